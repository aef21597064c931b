"""The micro-batches of one logical batch: what they weigh, what is held of them, and whether they may be applied."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .batch.denominators import REDUCTIONS, LogicalBatch
from .buffers import Cells
from .engine import Piece
from .errors import WEIGHT_CHOICES, DenominatorError, NonFiniteError, WindowError
from .results import LossRecord, Scalar, StepResult, total

if TYPE_CHECKING:
    from .optimizer import GradAccumOptimizer


@dataclass
class Declared:
    """What the caller said of one micro-batch."""

    weight: Any = None
    reduction: str = "mean"
    loss: Any = None
    samples: Any = None
    tokens: Any = None
    loss_scale: float = 1.0


class MicroBatches:
    """Collects micro-batches until they are committed as one step or discarded; nothing is applied before.

    ``open`` until it is committed, discarded, or a backward in it fails.

    Args:
        optimizer: Whose they are.
        where: The call its messages name.
        status: "open", or "new" where a ``with`` block opens it.
        closes_after: Micro-batches after which the caller commits in the same call.
    """

    def __init__(
        self,
        optimizer: GradAccumOptimizer,
        where: str = "window",
        status: str = "new",
        closes_after: int | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._engine = optimizer._engine
        self._where = where
        self._closes_after = closes_after
        self.status = status
        self._why = ""
        self.held: list[Piece] = []
        self._factors: list[Scalar] = []
        self._stored = False
        self._unweighted = False
        self.weights: list[Scalar] = []
        self._reductions: list[str] = []
        self._losses: list[LossRecord] = []
        self._samples: list[Scalar] = []
        self._tokens: list[Scalar] = []
        self._terms: dict[str, list[LossRecord]] = {}
        self._batch: LogicalBatch | None = None  # where loss terms were declared, or a plan is there
        self.loss_scale: float | None = None  # known from the first micro-batch on
        if status == "open":
            self._begin()

    def _begin(self) -> None:
        self.status = "open"
        self._engine.prepare()
        self._engine.touched.zero()
        self._rates = self._engine.learning_rates()

    @property
    def micro_batches(self) -> int:
        """Micro-batches taken so far."""
        return len(self.weights)

    def _expected(self) -> int | None:
        """Micro-batches of the whole window, where that is known."""
        return self._closes_after

    # -- micro-batches -------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Add the held micro-batches to the main grads if another would be one too many to hold."""
        if not self._engine.may_hold(self.held, self._expected(), self._stored):
            self._flush_pending()

    def run_backward(self, loss: torch.Tensor, factor: float = 1.0, weight: Scalar | None = None) -> None:
        """``(factor * loss).backward()``; a failure discards the window and clears half-written gradients."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"{self._where}: loss must be a tensor with one element, got {got}. Reduce it first.")
        if isinstance(weight, float) and weight == 0.0 and not loss.requires_grad:
            return  # not read, and there is nothing to run
        try:
            with torch.enable_grad():
                scaled = loss if factor == 1.0 else loss * factor
            scaled.backward()
        except BaseException as error:
            if self._outlives(error):
                raise
            self.discard(f"backward of micro-batch {self.micro_batches} raised {type(error).__name__}")
            self._optimizer._clear_grads()
            raise

    def _outlives(self, error: BaseException) -> bool:
        """Whether a failed backward leaves the window open, for another attempt."""
        return False

    def check(self, declared: Declared) -> Scalar:
        """Check what was said of a micro-batch, before anything is touched; returns its weight."""
        if declared.reduction not in REDUCTIONS:
            raise ValueError(f"{self._where}: reduction must be 'mean' or 'sum', got {declared.reduction!r}.")
        for name in ("loss", "samples", "tokens"):
            value = getattr(declared, name)
            if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
                raise ValueError(
                    f"{self._where}: {name} must be a tensor with one element, got {list(value.shape)}. Reduce it "
                    "first."
                )
        self._check_loss_scale(declared.loss_scale)
        weight = declared.weight
        if self.micro_batches > 0 and (weight is None or self._unweighted):
            self.require_weight(self.micro_batches if weight is None else 0)
        return 1.0 if weight is None else self._weight_value(weight)

    def _check_loss_scale(self, loss_scale: Any) -> None:
        number = isinstance(loss_scale, (int, float)) and math.isfinite(loss_scale) and loss_scale > 0
        if not number:
            raise ValueError(
                f"{self._where}: loss_scale must be a positive finite number (GradScaler.get_scale()), got "
                f"{loss_scale!r}."
            )
        if self.loss_scale is not None and self.loss_scale != loss_scale:
            self._give_up(
                "its loss scale changed",
                f"the loss scale was {self.loss_scale:g}, and micro-batch {self.micro_batches} has {loss_scale:g}: the "
                "sum would have no unit. Change the scale between windows.",
            )

    def require_weight(self, index: int | None = None) -> NoReturn:
        index = self.micro_batches if index is None else index
        raise DenominatorError(
            f"{self._where}: micro-batch {index} has no weight, and the window has more than one. {WEIGHT_CHOICES}"
        )

    def _weight_value(self, weight: Any) -> Scalar:
        index = self.micro_batches
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1 or weight.is_complex():
                raise DenominatorError(
                    f"{self._where}: weight of micro-batch {index} must have one element, got {list(weight.shape)}."
                )
            known = self._engine.host_value(weight)
            if known is None:
                if weight.device.type == "cpu":
                    self._check_weight(float(weight), weight)
                return weight.detach().to(device=self._engine.layout.device, dtype=torch.float64, copy=True).reshape(())
            weight = known
        try:
            value = math.nan if isinstance(weight, (str, bytes)) else float(weight)
        except (TypeError, ValueError):
            value = math.nan
        self._check_weight(value, weight)
        return value

    def _check_weight(self, value: float, weight: Any) -> None:
        """In fp32's range: that is what multiplies the gradient."""
        if not 0 <= value <= torch.finfo(torch.float32).max:
            raise DenominatorError(
                f"{self._where}: weight of micro-batch {self.micro_batches} must be a finite number >= 0, got {weight}."
            )

    def take(self, declared: Declared, weight: Scalar, failed: str = "") -> None:
        """Take the gradients that a finished backward left in ``.grad``, as one micro-batch.

        Args:
            declared: What was said of it.
            weight: Its checked weight.
            failed: What became of an earlier attempt, for the message where there is no gradient.
        """
        required = not (isinstance(weight, float) and weight == 0.0)
        piece = self._collect(clear=True, required=required, failed=failed)
        self.record(declared, weight)
        self.held.append(piece)
        self._factors.append(self.factor(declared.reduction, weight))
        self._engine.note_held(self.held)
        closing = self._closes_after is not None and self.micro_batches >= self._closes_after
        if not piece.exclusive and not closing:
            self._flush_pending()
        if self.micro_batches == 2:
            self._optimizer._warn_about_batch_norm()

    def take_summed(self) -> None:
        """Take what autograd has summed over the recorded micro-batches; ``.grad`` stays where it is."""
        nothing = all(isinstance(weight, float) and weight == 0.0 for weight in self.weights)
        self.held, self._factors = [self._collect(clear=False, required=not nothing)], [1.0]
        if self.micro_batches > 1:
            self._optimizer._warn_about_batch_norm()

    def _collect(self, clear: bool, required: bool, failed: str = "") -> Piece:
        piece, came_back = self._engine.collect(clear, self.held)
        if piece is None:
            self._give_up(
                "its parameters changed",
                "the parameters changed in an open window (replaced, added, frozen or unfrozen, resized, or moved to "
                "another device). Change parameters between windows.",
            )
        if came_back >= 0:
            self._give_up(
                "a held gradient's memory was used again",
                f"the gradient of parameter {came_back} lies where one lies that the window still holds: somebody "
                "reuses gradient memory behind torch's back, and the held values are lost. Use defer=1.",
            )
        if required and piece.present == 0:
            why = failed or "no active parameter's .grad is set"
            raise WindowError(
                f"{self._where}: micro-batch {self.micro_batches} has no gradient: {why}. Call backward first; nothing "
                "was counted."
            )
        return piece

    def _give_up(self, why: str, message: str) -> NoReturn:
        self.discard(why)
        self._optimizer._clear_grads()
        raise WindowError(f"{self._where}: {message} The window is discarded and .grad cleared.")

    @staticmethod
    def factor(reduction: str, weight: Scalar) -> Scalar:
        """What multiplies the gradient: the weight of a mean, 1 for a sum; a weight of 0 selects 0 for both."""
        if reduction == "mean":
            return weight
        if isinstance(weight, torch.Tensor):
            return (weight != 0).to(torch.float64)
        return float(weight != 0)

    def record(self, declared: Declared, weight: Scalar) -> None:
        """Enter one checked micro-batch in the ledger; tensors are copied, the caller may reuse them."""
        loss = self._snapshot(declared.loss)
        samples, tokens = self._snapshot(declared.samples), self._snapshot(declared.tokens)
        self._unweighted = declared.weight is None
        self.loss_scale = float(declared.loss_scale)
        self.weights.append(weight)
        self._reductions.append(declared.reduction)
        if loss is not None:
            self._losses.append(LossRecord(loss, weight, declared.reduction))
        if samples is not None:
            self._samples.append(samples)
        if tokens is not None:
            self._tokens.append(tokens)

    def _snapshot(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = self._engine.host_value(value)
        return value.detach().to(torch.float64, copy=True).reshape(()) if known is None else known

    def _flush_pending(self) -> None:
        if self.held:
            with torch.no_grad():
                self._engine.flush(self.held, self._factors, overwrite=not self._stored)
            self._stored = True
            self.held, self._factors = [], []

    # -- end -----------------------------------------------------------------------------------------------------

    def _require_open(self, what: str) -> None:
        if self.status == "new":
            raise WindowError(
                f"{self._where}: its with block has not been entered. Write 'with opt.window() as window:'."
            )
        if self.status != "open":
            because = f" ({self._why})" if self._why else ""
            raise WindowError(
                f"{self._where}: the window cannot be {what}, it is {self.status}{because}; nothing was applied. "
                "Open a new one."
            )

    def discard(self, why: str = "") -> None:
        """Drop everything taken so far. Nothing moves; the next window starts from zero."""
        if self.status == "open":
            self.status, self._why = "discarded", why
        self.held, self._factors, self._stored = [], [], False

    def close(self) -> tuple[Cells, StepResult]:
        """Measure and clip what was taken; the optimizer then updates from ``update_arguments``."""
        self._require_open("committed")
        engine = self._engine
        publish = engine.rule is None
        cells = engine.measure(self.held, self._factors, self._stored, store=publish)
        if self._optimizer.options.on_nonfinite == "raise" and float(cells.found_inf) != 0.0:
            self._raise_nonfinite()
        if publish:
            self._stored, self.held, self._factors = True, [], []
        batch, denominator = self._batch, self._denominator
        loss_scale = 1.0 if self.loss_scale is None else self.loss_scale
        engine.clip(cells, self.weights if denominator is None else [denominator], loss_scale)
        self._warn()
        unit = 1.0 if batch is None else batch.unit
        result = StepResult(
            cells.total_norm, cells.clip_coef, cells.found_inf, cells.multiplier,
            cells.weight_sum if unit == 1.0 else cells.weight_sum * unit,
            engine.learning_rates(), self.micro_batches, self._complete(self._samples), self._complete(self._tokens),
            self._losses, self._optimizer.options.host_scale * loss_scale, unit, self._terms, batch,
            self.weights, self._reductions,
        )  # fmt: skip
        return cells, result

    @property
    def _denominator(self) -> float | None:
        """What the boundary divides by; None: the sum of the weights."""
        batch = self._batch
        return None if batch is None or batch.denominator is None else batch.denominator / batch.unit

    def _complete(self, values: list[Scalar]) -> Scalar | None:
        return total(values) if len(values) == self.micro_batches else None

    @property
    def update_arguments(self) -> tuple[list[Piece], list[Scalar], bool]:
        """Pieces that are not in the main grads, their factors, and whether the main grads hold the others."""
        return self.held, self._factors, self._stored

    def _warn(self) -> None:
        counted = self.weights if self._denominator is None else [self._denominator]
        if all(isinstance(weight, float) and weight == 0.0 for weight in counted):
            warnings.warn(
                f"{self._where}: the window's total weight is 0, so it has no gradient; no step was made.", stacklevel=4
            )
        for group, (before, now) in enumerate(zip(self._rates, self._engine.learning_rates(), strict=False)):
            if isinstance(before, float) and isinstance(now, float) and before != now:
                warnings.warn(
                    f"{self._where}: the lr of group {group} changed from {before:g} to {now:g} in an open window; the "
                    "step uses the last one. Let opt.attach(scheduler=...) advance it once per applied step.",
                    stacklevel=4,
                )

    def _raise_nonfinite(self) -> None:
        bad = self._engine.nonfinite_params(self.held, self._factors, self._stored)
        self.discard("a gradient was not finite")
        names = ", ".join(map(str, bad[:8])) + (" ..." if len(bad) > 8 else "")
        raise NonFiniteError(
            f"{self._where}: the window's gradient is not finite in {len(bad)} parameter(s): {names}. Nothing was "
            "changed; on_nonfinite='skip' skips such a step instead."
        )
