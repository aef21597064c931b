"""The chain of factors that a token's gradient meets on its way into the update, with their product."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .modules import ranks_averaged
from .optimizer import GradAccumOptimizer
from .results import StepResult

MOST_COLUMNS = 8


@dataclass(frozen=True)
class Factor:
    """One link of the chain.

    Attributes:
        name: loss, host, DDP, scaler, weight, coefficient, denominator, unscale or clip.
        values: One per column.
        why: Who multiplies by it.
    """

    name: str
    values: tuple[float, ...]
    why: str


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; ``str()`` is a table.

    Attributes:
        columns: The last step's micro-batches, or, where loss terms were declared, the terms.
        factors: In the order they apply.
        notes: What does not add up, and what to do.
    """

    columns: tuple[str, ...]
    factors: tuple[Factor, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def products(self) -> tuple[float, ...]:
        """What a token's gradient is multiplied by in all: of a mean over N tokens it is clip / N in every column."""
        found = []
        for column in range(len(self.columns)):
            product = 1.0
            for factor in self.factors:
                product *= factor.values[column]
            found.append(product)
        return tuple(found)

    def __str__(self) -> str:
        def row(name: str, values: Sequence[str], why: str) -> str:
            return f"{name:12}" + "".join(f"{value:>15}" for value in values[:MOST_COLUMNS]) + f"  {why}".rstrip()

        more = f"and {len(self.columns) - MOST_COLUMNS} more" if len(self.columns) > MOST_COLUMNS else ""
        lines = [row("factor", self.columns, more)]
        lines += [row(factor.name, [f"{v:.6g}" for v in factor.values], factor.why) for factor in self.factors]
        lines.append(row("product", [f"{product:.6g}" for product in self.products], "what a token's gradient gets"))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def explain(opt: GradAccumOptimizer) -> Explanation:
    """The factors of the last real step, in order: loss, host, DDP, scaler, weight, denominator, clip.

    Reads device scalars, so it syncs; it looks through the living objects for a DistributedDataParallel that holds the
    parameters and for a GradScaler.

    Args:
        opt: An optimizer that has made a step.

    Raises:
        ValueError: It has made none.
    """
    result = opt.last_result
    if result is None:
        raise ValueError(
            "explain: the optimizer has not made a step yet; there is no chain to show. Call it after one."
        )
    ranks = ranks_averaged(opt._engine.layout.params)
    declared = result.batch is not None and result.batch.terms is not None
    columns, own = _of_terms(result) if declared else _of_micro_batches(result)
    loss_scale = result.scale / opt.options.host_scale
    host = (opt.options.host_scale, "already on the loss, as host_scale declares")
    if ranks > 1 and opt.options.host_scale == 1.0 / ranks:
        host = (1.0, "host_scale declares DDP's average")

    def same(name: str, value: float, why: str) -> Factor:
        return Factor(name, (value,) * len(columns), why)

    factors = (
        own[0],
        same("host", *host),
        same("DDP", 1.0 / ranks, f"DistributedDataParallel averages over {ranks} ranks" if ranks > 1 else "none"),
        same("scaler", loss_scale, "already on the loss, as loss_scale declares" if loss_scale != 1.0 else "none"),
        *own[1:],
        same("unscale", 1.0 / result.scale, "1 / (host_scale * loss_scale), at the boundary"),
        same("clip", float(result.clip_coef), f"total_norm {float(result.total_norm):.6g}"),
    )
    return Explanation(columns, factors, _notes(opt, result, ranks, loss_scale))


def _of_micro_batches(result: StepResult) -> tuple[tuple[str, ...], tuple[Factor, ...]]:
    weights = [float(weight) for weight in result.weights]
    means = [reduction == "mean" for reduction in result.reductions]
    loss = [1.0 / weight if mean and weight > 0 else 1.0 for weight, mean in zip(weights, means, strict=True)]
    applied = [weight if mean else float(weight != 0) for weight, mean in zip(weights, means, strict=True)]
    total = float(result.weight_sum)
    factors = (
        Factor("loss", tuple(loss), "1 / weight of a mean loss; 1 of a sum"),
        Factor("weight", tuple(applied), "weight of a mean loss; 1 of a sum, 0 of what is not read"),
        Factor("denominator", (1.0 / total if total else 0.0,) * len(loss), f"1 / sum of the weights ({total:g})"),
    )
    return tuple(f"micro-batch {i}" for i in range(len(loss))), factors


def _of_terms(result: StepResult) -> tuple[tuple[str, ...], tuple[Factor, ...]]:
    batch = result.batch
    terms = batch.terms
    main = float(result.weight_sum)  # where there is no plan, of all terms
    totals = [batch.totals.get(name, main) for name in terms]
    early = [0.0 if total == 0 or main == 0 else main / total / batch.unit for total in totals]
    boundary = batch.unit / main if main else 0.0
    factors = (
        Factor("loss", (1.0,) * len(totals), "sums; a mean is multiplied by what its piece counts"),
        Factor("coefficient", tuple(term.coefficient for term in terms.values()), "of the term"),
        Factor("weight", tuple(early), "before backward, so that one denominator divides all terms"),
        Factor("denominator", (boundary,) * len(totals), "at the boundary"),
    )
    return tuple(terms), factors


def _living_scale() -> float | None:
    scalers = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.amp.GradScaler)]
    return next((scaler.get_scale() for scaler in scalers if scaler.is_enabled() and scaler.get_scale() != 1.0), None)


def _notes(opt: GradAccumOptimizer, result: StepResult, ranks: int, loss_scale: float) -> tuple[str, ...]:
    notes = []
    if ranks > 1 and opt.options.host_scale != 1.0 / ranks:
        notes.append(
            f"DistributedDataParallel divides by {ranks} ranks and nothing undoes it. Where the denominators are those "
            f"of all ranks together, declare it: host_scale=1/{ranks}."
        )
    living = _living_scale()
    if living is not None and loss_scale == 1.0:
        notes.append(
            f"a GradScaler with scale {living:g} is alive. In boundary mode its step() unscales before ours; in a "
            "window pass loss_scale=scaler.get_scale() to backward."
        )
    if any(isinstance(weight, float) and weight == 0.0 for weight in result.weights):
        notes.append("a micro-batch of weight 0 is not read.")
    return tuple(notes)
