"""One accumulation window: which micro-batches it holds, what they weigh, and whether it may be applied."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .buffers import Cells
from .engine import Piece
from .errors import WEIGHT_CHOICES, DenominatorError, NonFiniteError, WindowError
from .results import LossRecord, Scalar, StepResult, total

if TYPE_CHECKING:
    from .optimizer import GradAccumOptimizer

REDUCTIONS = ("mean", "sum")
DISCARDED = "discard() was called"


@dataclass
class Declared:
    """What the caller said of one micro-batch."""

    weight: Any = None
    reduction: str = "mean"
    loss: Any = None
    samples: Any = None
    tokens: Any = None


class Window:
    """Collects micro-batches and commits them as one step; an exception in its block discards them.

    Made by ``GradAccumOptimizer.window()``::

        with opt.window() as window:
            for piece in pieces:
                loss_sum, n_active = model_loss(piece)
                window.backward(loss_sum, weight=n_active, reduction="sum")

    A window is ``open`` until it is committed, discarded, or a backward in it fails; nothing is applied before commit.

    Args:
        optimizer: Whose window it is.
        where: The call its messages name.
        status: "new" until its ``with`` block is entered; "open" for the modes' own windows.
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
        self._losses: list[LossRecord] = []
        self._samples: list[Scalar] = []
        self._tokens: list[Scalar] = []
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

    # -- the with block ------------------------------------------------------------------------------------------

    def __enter__(self) -> Window:
        if self.status != "new":
            raise WindowError(f"window: this one is {self.status}; a window is used once. Call opt.window() again.")
        self._optimizer._enter_window(self)
        try:
            self._begin()
        except BaseException:
            self._optimizer._leave_window(self)
            raise
        self._refuse_stale_grads("opened")
        self._engine.forget_unfinished_backward()  # whatever it wrote is gone
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._optimizer._leave_window(self)
        if error_type is not None:
            self.discard(f"{error_type.__name__} was raised in it")
            self._optimizer._clear_grads()
            return
        if self.status == "discarded" and self._why == DISCARDED:
            return  # by the caller, who knows
        self._require_open("committed")
        self._refuse_stale_grads("committed")
        if self.micro_batches == 0:
            self.status = "committed"
            warnings.warn("the window closed without a micro-batch; no step was made.", stacklevel=2)
            return
        self._optimizer._commit(self)

    def _refuse_stale_grads(self, what: str) -> None:
        index = self._engine.collector.first_with_grad()
        if index >= 0:
            self._optimizer._leave_window(self)
            self._give_up(
                f"parameter {index} had a .grad of its own",
                f"parameter {index} has a .grad of somebody else's where the window is {what}; nobody can say what it "
                "weighs. Call opt.zero_grad(set_to_none=True) before the window and run every backward of a window "
                "through window.backward().",
            )

    # -- micro-batches -------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        reduction: str = "mean",
        samples: Scalar | None = None,
        tokens: Scalar | None = None,
    ) -> None:
        """Run one micro-batch's backward and take its gradients.

        The step sees ``sum_i(w_i * g_i) / sum_i(w_i)`` with mean losses, ``sum_i(g_i) / sum_i(w_i)`` with sums.

        Args:
            loss: The micro-batch's loss, one element.
            weight: How much of the logical batch it is: active tokens, samples; a number or a one-element tensor,
                finite and >= 0 (on a device that is not checked: it would cost a sync). 0 means that neither its
                gradient nor its loss is read. May be left out only if the window has a single micro-batch.
            reduction: "mean" if ``loss`` is a mean over ``weight`` items, "sum" if it is their sum.
            samples: Samples in it, for the result.
            tokens: Tokens in it, for the result.

        Raises:
            DenominatorError: No weight and more than one micro-batch, or a weight that is no finite number >= 0.
            WindowError: The window is not open, or a parameter has a ``.grad`` from elsewhere.
            Exception: Whatever backward raised; the window is discarded and the half-written ``.grad`` cleared.
        """
        self._require_open("used")
        declared = Declared(weight, reduction, loss, samples, tokens)
        checked = self.check(declared)
        self._refuse_stale_grads("used")
        self.make_room()
        self.run_backward(loss, weight=checked)
        self.take(declared, checked)

    def make_room(self) -> None:
        """Add the held micro-batches to the main grads if another would be one too many to hold."""
        if not self._engine.may_hold(self.held, self._closes_after, self._stored):
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
            self.discard(f"backward of micro-batch {self.micro_batches} raised {type(error).__name__}")
            self._optimizer._clear_grads()
            raise

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
        weight = declared.weight
        if self.micro_batches > 0 and (weight is None or self._unweighted):
            self.require_weight(self.micro_batches if weight is None else 0)
        return 1.0 if weight is None else self._weight_value(weight)

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
        self.weights.append(weight)
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
        engine.clip(cells, self.weights)
        self._warn()
        result = StepResult(
            cells.total_norm, cells.clip_coef, cells.found_inf, cells.multiplier, cells.weight_sum,
            engine.learning_rates(), self.micro_batches, self._complete(self._samples), self._complete(self._tokens),
            self._losses, self._optimizer.options.host_scale,
        )  # fmt: skip
        self.status = "committed"
        return cells, result

    def _complete(self, values: list[Scalar]) -> Scalar | None:
        return total(values) if len(values) == self.micro_batches else None

    @property
    def update_arguments(self) -> tuple[list[Piece], list[Scalar], bool]:
        """Pieces that are not in the main grads, their factors, and whether the main grads hold the others."""
        return self.held, self._factors, self._stored

    def _warn(self) -> None:
        if all(isinstance(weight, float) and weight == 0.0 for weight in self.weights):
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
