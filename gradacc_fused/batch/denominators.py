"""Which denominator divides each loss term, and the factor it gets before backward so that one pass divides them all.

With counts known beforehand (a plan: *early*) a term's share of the logical batch's loss is

    coefficient * sum_i(value_i) / N        value_i: its sum over piece i, or its mean times what piece i counts

for any mix of denominators N. One of them, D, is left to the boundary: each term gets D / (N * unit) before backward,
and the boundary divides by D / unit. ``unit`` is the largest power of two in D, so where all terms share one
denominator the factor is a power of two: exact in every dtype, and gradients are as large as those of a mean (fp16 sums
do not overflow).

Known at the end (*late*), the boundary divides by the sum of what the pieces counted: one denominator for all terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ..errors import DenominatorError, WindowError
from ..results import LossRecord, Scalar
from .plan import Piece, Plan

MICRO_BATCHES = "micro_batches"
UNNAMED = "loss"  # the one term of a loss that is no mapping
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Term:
    """How one loss term is divided.

    Attributes:
        denominator: The count of the logical batch that divides it: "samples", "active_tokens", "advantage_tokens", a
            count of your own (``total_`` in front is understood); "micro_batches": the mean of the pieces' values, for
            a statistic that each piece has one of; None: nothing, a pure sum.
        coefficient: What it is multiplied by in the loss.
        reduction: "sum": the values passed are sums over what is counted. "mean": they are means over it.
        across_samples: It compares samples with each other (contrastive, pairwise): then pieces would each see only
            their own, and more than one piece is refused.

    Raises:
        ValueError: No such reduction, or a coefficient that is no finite number.
    """

    denominator: str | None
    coefficient: float = 1.0
    reduction: str = "sum"
    across_samples: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"Term: reduction must be 'mean' or 'sum', got {self.reduction!r}.")
        if not math.isfinite(self.coefficient):
            raise ValueError(f"Term: coefficient must be a finite number, got {self.coefficient}.")
        if self.denominator is None and self.reduction == "mean":
            raise ValueError("Term: a mean needs a denominator: what it is a mean over. None is for pure sums.")
        if self.denominator is not None:
            object.__setattr__(self, "denominator", self.denominator.removeprefix("total_"))

    @property
    def averaged(self) -> bool:
        """Whether a value stands for each of what its piece counts, and is multiplied by that count."""
        return self.reduction == "mean" or self.denominator == MICRO_BATCHES


Declaration = str | Term | Mapping[str, str | Term | None]


def declared_terms(terms: Declaration | None) -> dict[str, Term] | None:
    """Terms by name, from what was passed as ``terms``; None where nothing was declared."""
    if terms is None:
        return None
    if not isinstance(terms, (str, Term, Mapping)):
        raise TypeError(f"window: terms must be a count's name, a Term or a mapping, got {type(terms).__name__}.")
    named: Mapping[str, str | Term | None] = terms if isinstance(terms, Mapping) else {UNNAMED: terms}
    for name, term in named.items():
        if not (term is None or isinstance(term, (str, Term))):
            raise TypeError(
                f"window: terms[{name!r}] must be a count's name, a Term or None (a pure sum), got "
                f"{type(term).__name__}."
            )
    return {name: term if isinstance(term, Term) else Term(term) for name, term in named.items()}


@dataclass
class Combined:
    """One micro-batch's loss as backward gets it.

    Attributes:
        loss: One element; its gradient is what the window adds up.
        weight: What it adds to a late denominator; early 1, or 0 where no term is read.
        reduction: Whether the weight still multiplies the gradient ("mean").
        records: Each term's value and what it counts, for the result.
    """

    loss: torch.Tensor
    weight: Scalar
    reduction: str
    records: dict[str, LossRecord]


class LogicalBatch:
    """The terms of one window, and what divides them.

    Args:
        terms: By name; None: nothing was declared, which a plan of one piece allows.
        plan: Of the logical batch; None: late.

    Raises:
        DenominatorError: A count that the plan does not have; several denominators and no plan.
        WindowError: A term across samples and more than one piece.
    """

    def __init__(self, terms: dict[str, Term] | None, plan: Plan | None) -> None:
        self.terms = terms
        self.plan = plan
        self.pieces = 0 if plan is None else sum(not piece.padding for piece in plan.pieces)
        self.totals: dict[str, float] = {}
        self.denominator: float | None = None  # that the boundary divides by; None: by the sum of the weights
        self.unit = 1.0
        if plan is not None:
            if self.pieces > 1 and self.across_samples:
                self._refuse_across_samples(self.across_samples[0])
            self.totals = {name: self._planned_total(name, term) for name, term in (terms or {}).items()}
            self._choose_denominator()
        elif terms is not None:
            self._require_one_denominator(terms)

    def _refuse_across_samples(self, name: str) -> NoReturn:
        raise WindowError(
            f"window: term {name!r} compares samples with each other, and the logical batch has {self.pieces} pieces: "
            "each would see only its own samples, which is another loss. Run it in one piece (activation "
            "checkpointing saves memory), or compute it from embeddings gathered over the pieces first."
        )

    @property
    def across_samples(self) -> list[str]:
        """Names of the terms that compare samples with each other."""
        return [name for name, term in (self.terms or {}).items() if term.across_samples]

    def _choices(self) -> str:
        counts = ("samples", *self.plan.counts) if self.plan is not None else ("samples", "active_tokens", "...")
        return (
            f"Declare one with opt.window(..., terms={{name: denominator}}): a count ({', '.join(map(repr, counts))}), "
            "'micro_batches' (the mean of the pieces' values), or None (a pure sum)."
        )

    def _planned_total(self, name: str, term: Term) -> float:
        assert self.plan is not None
        if term.denominator is None:
            return 1.0
        if term.denominator == MICRO_BATCHES:
            return float(self.pieces)
        total = self.plan.totals.get(f"total_{term.denominator}")
        if total is None:
            raise DenominatorError(
                f"window: term {name!r} is divided by {term.denominator!r}, which the plan does not count. Pass "
                f"counts={{{term.denominator!r}: ...}} to plan_batch. {self._choices()}"
            )
        return total

    def _choose_denominator(self) -> None:
        """The first term's that is not 0: the main loss comes first, and keeps its last bit."""
        self.denominator = next((total for total in self.totals.values() if total > 0), 0.0 if self.totals else 1.0)
        self.unit = 2.0 ** (math.frexp(self.denominator)[1] - 1) if self.denominator > 0 else 1.0

    def _require_one_denominator(self, terms: dict[str, Term]) -> None:
        found = {name: term.denominator for name, term in terms.items()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name!r} by {denominator!r}" for name, denominator in found.items())
            raise DenominatorError(
                f"window: the terms have different denominators ({listed}), so each must be divided before its "
                "backward, and the totals be known before the first. Pass a plan: opt.window(gf.plan_batch(...)), or "
                "gf.plan_pieces(...) for micro-batches that are cut already."
            )
        if set(found.values()) == {None}:
            self.denominator = 1.0

    # -- one micro-batch -----------------------------------------------------------------------------------------

    def named(self, losses: Any, where: str) -> dict[str, torch.Tensor]:
        """The losses by term, checked against the declaration."""
        named = dict(losses) if isinstance(losses, Mapping) else {UNNAMED: losses}
        for name, loss in named.items():
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
                got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                todo = (
                    "Reduce it first" if isinstance(loss, torch.Tensor) else "A loss with outputs is a gf.PieceOutput"
                )
                raise ValueError(f"{where}: loss term {name!r} must be a tensor with one element, got {got}. {todo}.")
        if not named:
            raise ValueError(f"{where}: loss must have at least one term, got none.")
        if self.terms is None:
            if self.pieces > 1:
                raise DenominatorError(
                    f"{where}: nobody said what divides {', '.join(map(repr, named))}, and the logical batch has "
                    f"{self.pieces} pieces. {self._choices()}"
                )
            return named
        if not isinstance(losses, Mapping) and UNNAMED not in self.terms:
            raise DenominatorError(
                f"{where}: the terms {', '.join(map(repr, self.terms))} were declared, and the loss is one tensor. "
                "Pass a mapping: {name: loss}."
            )
        for name in named:
            if name not in self.terms:
                raise DenominatorError(f"{where}: nobody said what divides {name!r}. {self._choices()}")
        for name in self.terms:
            if name not in named:
                raise DenominatorError(
                    f"{where}: term {name!r} was declared and is not among the losses ({', '.join(map(repr, named))}). "
                    "Leave it out of terms, or pass its value."
                )
        return named

    def combine(self, losses: Any, piece: Piece | None, counts: Mapping[str, Scalar], where: str) -> Combined:
        """The loss that backward gets.

        Args:
            losses: A tensor, or one per term.
            piece: With a plan.
            counts: Without one: what the micro-batch counts.
            where: The call that messages name.
        """
        named = self.named(losses, where)
        if piece is not None:
            return self._early(named, piece)
        assert self.terms is not None
        return self._late(named, self.terms, counts, where)

    def _count(self, term: Term, piece: Piece) -> float:
        if piece.padding:
            return 0.0
        if term.denominator is None:
            return 1.0
        if term.denominator == MICRO_BATCHES:
            assert self.plan is not None
            return len(piece.samples) / len(self.plan.pieces[piece.index].samples)
        return piece.counts[term.denominator]

    def _early(self, named: dict[str, torch.Tensor], piece: Piece) -> Combined:
        records, scaled = {}, []
        for name, loss in named.items():
            term = Term(None) if self.terms is None else self.terms[name]
            count = self._count(term, piece)
            records[name] = LossRecord(loss, count, "mean" if term.averaged else "sum")
            if count == 0.0:
                continue  # not read
            assert self.denominator is not None
            factor = term.coefficient * (self.denominator / self.totals.get(name, 1.0) / self.unit)
            factor *= count if term.averaged else 1.0
            scaled.append(loss if factor == 1.0 else loss * factor)
        if not scaled:
            return Combined(_sum(list(named.values())), 0.0, "sum", records)
        return Combined(_sum(scaled), 1.0, "sum", records)

    @staticmethod
    def _late(
        named: dict[str, torch.Tensor], terms: dict[str, Term], counts: Mapping[str, Scalar], where: str
    ) -> Combined:
        denominator = next(iter(terms.values())).denominator
        weight: Scalar = 1.0
        if denominator is not None and denominator != MICRO_BATCHES:
            if denominator not in counts:
                raise DenominatorError(
                    f"{where}: the terms are divided by {denominator!r}, and nobody said how many this micro-batch "
                    f"has. Pass counts={{{denominator!r}: n}}."
                )
            weight = counts[denominator]
        averaged = {name: term.averaged and denominator is not None for name, term in terms.items()}
        as_mean = all(averaged.values())
        scaled = []
        for name, loss in named.items():
            factor = terms[name].coefficient
            scaled.append(loss if factor == 1.0 else loss * factor)
            if averaged[name] and not as_mean:
                scaled[-1] = scaled[-1] * weight  # as a sum, like the others
        records = {name: LossRecord(loss, weight, "mean" if averaged[name] else "sum") for name, loss in named.items()}
        return Combined(_sum(scaled), weight, "mean" if as_mean else "sum", records)


def _sum(losses: list[torch.Tensor]) -> torch.Tensor:
    result = losses[0].reshape(())
    for loss in losses[1:]:
        result = result + loss.reshape(())
    return result
