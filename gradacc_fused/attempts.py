"""Runs one planned piece, in parts where memory runs out: nothing of an attempt that failed is left."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .batch.denominators import MICRO_BATCHES, Combined
from .batch.out_of_memory import is_out_of_memory, release
from .batch.plan import Piece, Plan, rows_of
from .errors import DenominatorError
from .micro_batches import Declared
from .modules import ranks_averaged
from .results import Scalar

if TYPE_CHECKING:
    from .window import Window

Losses = torch.Tensor | Mapping[str, torch.Tensor]


class PieceOutput(NamedTuple):
    """What a piece's function returns to ``Window.run`` when it has more than the loss.

    Attributes:
        loss: One element, or one per loss term.
        outputs: Results of its samples, in order: a tensor's first dimension or a sequence's items; kept detached.
        counts: What was really counted, checked against the plan.
    """

    loss: Losses
    outputs: Any = None
    counts: Mapping[str, Scalar] | None = None


@dataclass
class Ready:
    """A micro-batch that was checked and may run."""

    declared: Declared
    weight: Scalar
    piece: Piece | None
    combined: Combined | None


class Attempts:
    """One call of ``Window.run``.

    Args:
        window: Whose piece it is.
        plan: The window's.
        fn: Forward of a piece.
        split_on_oom: Whether to try again with less where memory runs out.
        loss_scale: Already on what ``fn`` returns.
    """

    def __init__(
        self,
        window: Window,
        plan: Plan,
        fn: Callable[[Piece], Losses | PieceOutput],
        split_on_oom: bool,
        loss_scale: float,
    ) -> None:
        self._window = window
        self._engine = window._engine
        self._plan = plan
        self._fn = fn
        self._split_on_oom = split_on_oom
        self._loss_scale = loss_scale

    def run(self, piece: Piece) -> list[Any] | None:
        """Run and take all of the piece; its samples' outputs."""
        parts, outputs, given = [piece], [], True
        try:
            while parts:
                part = parts.pop(0)
                done, results = self._attempt(part)
                if not done:
                    parts[:0] = self._with_less(part)
                elif results is None:
                    given = False
                else:
                    outputs += results
        except BaseException as error:
            if self._split_on_oom and len(part.samples) == 1 and is_out_of_memory(error):
                _explain(error, part)
            self._window.fail(error, f"{type(error).__name__} was raised in piece {piece.index}")
            raise
        finally:
            self._window.retries = False
        return outputs if given else None

    def _attempt(self, part: Piece) -> tuple[bool, list[Any] | None]:
        """Run and take a part; False if it ran out of memory and may be tried again with less."""
        window = self._window
        before = window.save_state() if self._split_on_oom else None
        window.retries = self._split_on_oom and (len(part.samples) > 1 or bool(window.held))
        try:
            if window.ledger is not None:
                window.refuse(window.ledger.unexpected(part))
            window.make_room()  # before the forward needs it
            with torch.enable_grad():
                made = self._fn(part)
            output = made if isinstance(made, PieceOutput) else PieceOutput(made)
            ready = window.prepare(output.loss, part, output.counts, Declared(loss_scale=self._loss_scale), None)
            results = None if output.outputs is None else _per_sample(part, output.outputs, self._plan.packed)
            window.run_backward(ready.declared.loss, weight=ready.weight)
        except Exception as error:
            if not window._outlives(error):
                raise
        else:
            window.retries = False
            window.take_ready(ready)
            return True, results
        self._engine.clear_grads()
        if before is not None:
            before.restore()
        return False, None  # the error is gone, and with it the frames that held what it had allocated

    def _with_less(self, part: Piece) -> Sequence[Piece]:
        """What to run in place of a part that ran out of memory: itself, once nothing is held beside it, or halves."""
        window = self._window
        held, window.short_of_memory = bool(window.held), True
        window._flush_pending()
        release(self._engine.layout.device)
        if held or len(part.samples) == 1:
            return [part]
        assert window._batch is not None
        terms = window._batch.terms
        if terms is None:
            raise DenominatorError(
                f"window.run: piece {part.index} ran out of memory, and nobody said what divides its loss in parts. "
                "Declare it: opt.window(plan, terms=...)."
            )
        if ranks_averaged(self._engine.layout.params) > 1:
            window.refuse(
                f"piece {part.index} ran out of memory and DistributedDataParallel holds the parameters: a split "
                "here would leave the other ranks waiting. Plan smaller pieces (gf.find_micro_batch)"
            )
        across = window._batch.across_samples
        if across:
            window.refuse(f"piece {part.index} ran out of memory and term {across[0]!r} compares its samples: no split")
        statistics = [name for name, term in terms.items() if term.denominator == MICRO_BATCHES]
        if statistics:
            warnings.warn(
                f"window: piece {part.index} ran out of memory and is split, so term {statistics[0]!r}, one value per "
                "piece, is now the mean of its parts' values by samples.",
                stacklevel=5,
            )
        return self._plan.split(part)


def _explain(error: BaseException, part: Piece) -> None:
    if hasattr(error, "add_note"):
        error.add_note(
            f"window.run: sample {part.samples[0]} alone (of piece {part.index}) does not fit, and nothing is left "
            "to split. Use activation checkpointing (torch.utils.checkpoint), shorter sequences or a smaller model."
        )


def _per_sample(part: Piece, outputs: Any, packed: bool) -> list[Any]:
    rows = rows_of(part, outputs, packed, f"window.run: outputs of piece {part.index}")
    return [_detached(row) for row in rows]


def _detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, (list, tuple)):
        return [_detached(item) for item in output]
    return output
