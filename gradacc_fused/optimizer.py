"""GradAccumOptimizer: a torch.optim.Optimizer around another one, with exact accumulation windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import batch_norm, checkpoint, hooks
from .attach import Attached
from .batch.denominators import Declaration, LogicalBatch, declared_terms
from .batch.plan import Plan
from .engine import Engine
from .errors import WindowError
from .guards import check_inner
from .memory import MemoryReport
from .micro_batches import Declared, MicroBatches
from .modes import Boundary, Counting
from .options import Options
from .publish import Publisher
from .results import Scalar, StepResult
from .window import DISCARDED, Window
from .wrapper import Wrapper


class GradAccumOptimizer(Wrapper):
    """Gradient accumulation with the update of ``inner``, exact and in one boundary pass.

    ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own. AdamW, Adam, SGD and ``Lion`` run
    as fused rules; any other optimizer runs its own ``step`` on the accumulated, clipped gradient, published as
    ``p.grad``.

    Args:
        inner: The optimizer whose rule, groups and state are used.
        accumulation_steps: None (default): every ``step()`` is a boundary, and ``window()`` is at hand. An int k: every
            k-th ``step()`` is; the loop does not change otherwise.
        weighting: Required with ``accumulation_steps`` > 1. "equal": the mean of micro-batch means. "given": each
            ``step(weight=n)`` says how many samples or active tokens its mean loss was taken over.
        host_scale: A factor that somebody else has already multiplied into every loss: 1/k for a loop that divides.
        max_grad_norm: Clip the gradient's norm, as ``torch.nn.utils.clip_grad_norm_`` would the whole batch's.
        norm_type: 2 or inf.
        max_grad_value: Clip by value, as ``torch.nn.utils.clip_grad_value_`` would, after the norm.
        master_weights: Keep fp32 main params for bf16 and fp16 parameters (default). False: update them as they are.
        defer: How many micro-batches' gradients a window may hold before it adds them to the main grads in one pass:
            an int, or "auto" (default): what ``defer_bytes`` allows.
        defer_bytes: What "auto" may take beyond one micro-batch's gradients and the main grads. None: as many bytes as
            the main grads have, which holds three bf16 micro-batches, or five where five are the whole window.
        on_nonfinite: "skip" a step whose gradient is not finite (no host sync), or "raise" NonFiniteError (one sync).
        backend: None: ``GRADACC_FUSED_BACKEND``, else the best that runs here; "cpu", "cuda", "triton", "reference".

    Raises:
        TypeError, ValueError: An option or a parameter is refused; the message says what to do.
        BackendUnavailableError: The backend asked for cannot run here.
    """

    last_result: StepResult | None

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        accumulation_steps: int | None = None,
        weighting: str | None = None,
        host_scale: float = 1.0,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        max_grad_value: float | None = None,
        master_weights: bool = True,
        defer: int | str = "auto",
        defer_bytes: int | None = None,
        on_nonfinite: str = "skip",
        backend: str | None = None,
    ) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(
                f"GradAccumOptimizer: inner must be a torch.optim.Optimizer, got {type(inner).__name__}. Write "
                "GradAccumOptimizer(torch.optim.AdamW(model.parameters(), lr=...))."
            )
        if isinstance(inner, GradAccumOptimizer):
            raise TypeError("GradAccumOptimizer: inner is already a GradAccumOptimizer; wrap the plain optimizer.")
        check_inner(inner)
        options = Options(
            accumulation_steps, weighting, host_scale, max_grad_norm, norm_type, max_grad_value, master_weights, defer,
            defer_bytes, on_nonfinite, backend,
        )  # fmt: skip
        self._initialise(inner, options)

    def _initialise(self, inner: torch.optim.Optimizer, options: Options) -> None:
        self._wrap(inner)
        self.options = options
        self.last_result = None
        self._engine = Engine(inner, options)
        self._engine.prepare()
        self._attached = Attached()
        self._publisher = Publisher(self._engine)
        self._open: Window | None = None
        self._closed = False
        self._looked_for_batch_norm = False
        steps = options.accumulation_steps
        self._mode: Boundary | Counting = Boundary(self) if steps is None else Counting(self, steps)

    # -- what a torch.optim.Optimizer has --------------------------------------------------------------------------

    def _before_state_is_read(self) -> None:
        if "_engine" in self.__dict__ and not self._engine.has_state:
            self._make_state()

    def _after_state_was_replaced(self) -> None:
        if "_engine" in self.__dict__:
            self._engine.forget_state()

    def _make_state(self) -> None:
        if self._taken() == 0:
            self._engine.prepare()
        if self._engine.rule is not None and self._engine.matches():
            _ = self._engine.state

    def _taken(self) -> int:
        """Micro-batches in an open window, of whichever kind."""
        return self._mode.micro_batches + (0 if self._open is None else self._open.micro_batches)

    def _require_no_window(self, what: str) -> None:
        count = self._taken()
        if count:
            raise WindowError(
                f"{what}: a window with {count} micro-batch(es) is open. Finish it (flush(), or the end of the with "
                "block) or discard() it first."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer. Between windows only.

        Raises:
            WindowError: A window with micro-batches is open.
        """
        if "_engine" not in self.__dict__:
            super().add_param_group(param_group)
            return
        self._require_no_window("add_param_group")
        self.inner.add_param_group(param_group)
        try:
            self._engine.prepare()
        except (TypeError, ValueError):
            self.inner.param_groups.pop()
            self._engine.prepare()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, exchangeable with plain torch for fp32 parameters, and a window open in counting mode.

        Raises:
            WindowError: In the ``with`` block of a window, or between ``opt.backward()`` and its ``step()``.
        """
        if self._open is not None:
            self._require_no_window("state_dict")
        return checkpoint.state_dict(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ours or plain torch's state dict; moments and main params of low-precision parameters stay fp32."""
        self._require_no_window("load_state_dict")
        checkpoint.load_state_dict(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle carry: the inner optimizer with groups and state, and the options."""
        self._require_no_window("deepcopy and pickle")
        return {
            "inner": self.inner,
            "options": self.options,
            "main_params": self._publisher.saved_main_params(),
            "schedulers": self._attached.schedulers,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._initialise(state["inner"], state["options"])
        self._publisher.restore_main_params(state["main_params"])
        for scheduler in state["schedulers"]:
            self._attached.take_over(scheduler)

    # -- windows -------------------------------------------------------------------------------------------------

    def window(
        self,
        plan: Plan | None = None,
        *,
        terms: Declaration | None = None,
        rank: int | None = None,
        restore_state: bool | torch.nn.Module = False,
    ) -> Window:
        """A window to be used in a ``with`` block: commits and steps at its end, an exception discards it.

        Args:
            plan: The logical batch: each of its pieces must run once, in order, with the counts it promised.
            terms: What divides each loss term: a count's name, a ``Term``, or a mapping of them by the term's name.
            rank: Whose pieces of the plan run here; None: this process's rank in torch.distributed, 0 without it.
            restore_state: Whether a discarded window also puts back random-number generators and running statistics of
                batch norms; a module: and all of its buffers.

        Raises:
            WindowError: Another window of this optimizer is open; a term compares samples of several pieces.
            DenominatorError: A term's denominator is not counted by the plan; terms that differ in it, and no plan.
        """
        self._require_not_closed("window")
        self._require_no_window("window")
        if not (plan is None or isinstance(plan, Plan)):
            raise TypeError(f"window: plan must be a gf.Plan, got {type(plan).__name__}. Terms are passed as terms=...")
        named = declared_terms(terms)
        batch = None if plan is None and named is None else LogicalBatch(named, plan)
        return Window(self, batch, 0 if plan is None else plan.this_rank(rank), restore_state)

    def _enter_window(self, window: Window) -> None:
        if self._open is not None:
            raise WindowError("window: another window of this optimizer is open. Windows do not nest.")
        self._require_no_window("window")
        self._open = window

    def _leave_window(self, window: Window) -> None:
        self._open = None

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        reduction: str | None = None,
        samples: Scalar | None = None,
        tokens: Scalar | None = None,
    ) -> None:
        """``loss.backward()`` with what the micro-batch weighs; a failure discards the window and clears ``.grad``.

        In an open ``window()`` the same as ``window.backward``. In counting mode the next ``step()`` takes it. Without
        ``accumulation_steps`` autograd itself accumulates until ``step()``, so the weight of a mean loss multiplies the
        loss here; ``step()`` divides by the sum of the weights.

        Raises:
            DenominatorError: The weight is missing where it is needed, or is no finite number >= 0.
        """
        if self._open is not None:
            self._open.backward(loss, weight=weight, reduction=reduction, samples=samples, tokens=tokens)
            return
        self._mode.backward(Declared(weight, reduction or "mean", loss, samples, tokens))

    # -- step ----------------------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | torch.Tensor | None = None,
        loss: torch.Tensor | float | None = None,
        samples: Scalar | None = None,
        tokens: Scalar | None = None,
    ) -> Any:
        """Take this micro-batch's gradients; at a boundary make the real step.

        Args:
            closure: Runs forward and backward of the micro-batch and returns its loss.
            weight: With ``weighting="given"``: how many samples or active tokens the mean loss was taken over.
            loss: The micro-batch's loss, for ``last_result``.
            samples: Samples in it, for ``last_result``.
            tokens: Tokens in it, for ``last_result``.

        Returns:
            What ``closure`` returned, else None. ``last_result`` holds the outcome of the last real step.

        Raises:
            DenominatorError: ``weight`` is missing, not wanted, or no finite number >= 0.
            WindowError: A ``with opt.window()`` block is open, there is no gradient, or a backward did not finish.
        """
        self._require_not_closed("step")
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
            loss = value if loss is None and isinstance(value, torch.Tensor) and value.numel() == 1 else loss
        if self._open is not None:
            raise WindowError("step: a 'with opt.window()' block is open and steps at its end. Call step() outside it.")
        if self._publisher.is_probe():
            self._publisher.probe()
            return value
        self._mode.step(Declared(weight, "mean", loss, samples, tokens))
        return value

    # What torch's wrappers around step would do is done once per real step, in _commit: firing hooks, and telling an
    # LRScheduler that a step came first.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def flush(self) -> StepResult | None:
        """Make the real step with the micro-batches taken so far, normalised by what was really seen.

        Returns:
            The result, or None where there was nothing to flush.
        """
        return self.last_result if self._mode.flush() else None

    def discard(self) -> None:
        """Drop the open window and the gradients in ``.grad``; nothing moves."""
        if self._open is not None:
            self._open.discard(DISCARDED)
        self._clear_grads()

    def _clear_grads(self) -> None:
        """Clear ``.grad``, and with it what the modes know of it."""
        self._mode.discard("its gradients were cleared")
        self._engine.clear_grads()

    # -- the boundary --------------------------------------------------------------------------------------------

    def _warn_about_batch_norm(self) -> None:
        if not self._looked_for_batch_norm:
            self._looked_for_batch_norm = True
            batch_norm.warn_about_batch_norm(self._engine.layout.params)

    def _commit(self, window: MicroBatches) -> None:
        with torch.inference_mode(False), torch.no_grad():
            cells, result = window.close()
            applies = self._applies(result)
            if applies:
                hooks.fire(self, "pre", self._engine.rule is None)
            window.status = "committed"  # from here on parameters move
            if self._engine.rule is not None:
                self._engine.update(cells, *window.update_arguments)
            elif applies:
                self._publisher.step(cells)
            window.discard()
        self.last_result = result
        self._opt_called = self.inner._opt_called = True  # type: ignore[attr-defined]  # LRScheduler asks for it
        if applies:
            try:
                hooks.fire(self, "post", self._engine.rule is None)
            finally:
                self._attached.advance()

    def _applies(self, result: StepResult) -> bool:
        """Whether the step is applied. On a device the answer would cost a sync: there the kernels alone decide."""
        found_inf = self._engine.read_flag(result.found_inf)
        multiplier = self._engine.read_flag(result.multiplier)
        if found_inf is None or multiplier is None:
            return True if self._engine.rule is not None else not result.skipped
        return found_inf == 0.0 and multiplier == multiplier

    def attach(self, *, scheduler: Any) -> None:
        """Let an LR scheduler advance once per applied step; its own ``step()`` then does nothing.

        Args:
            scheduler: A torch.optim.lr_scheduler scheduler built on this optimizer or on the inner one.

        Raises:
            TypeError: It is no scheduler, or has no epoch-wise ``step()`` (ReduceLROnPlateau needs a metric).
            ValueError: It schedules another optimizer, or is attached already.
        """
        self._attached.add(scheduler, (self, self.inner))

    def memory_report(self) -> MemoryReport:
        """Bytes kept beside parameters and their ``.grad``: now, and the peak of the windows so far."""
        return self._engine.memory_report(self._mode.held if self._open is None else self._open.held)

    def close(self) -> None:
        """Remove every hook from parameters and schedulers; an open window is discarded, and no step follows."""
        self.discard()
        self._engine.close()
        self._attached.remove()
        self._closed = True

    def _require_not_closed(self, what: str) -> None:
        if self._closed:
            raise WindowError(
                f"{what}: this optimizer was closed, and its hooks are gone. Wrap its inner optimizer anew."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad`` as torch does; what an open window has taken is not touched."""
        self._mode.forget_untaken()
        if self._taken() == 0:
            self._engine.prepare()  # before the backward that follows: its parameters are to be watched
        self._engine.forget_unfinished_backward()
        super().zero_grad(set_to_none=set_to_none)

    def __repr__(self) -> str:
        steps = self.options.accumulation_steps
        mode = "boundary" if steps is None else f"accumulation_steps={steps}"
        return f"GradAccumOptimizer({mode}, backend={self.backend}, inner={self.inner!r})"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler before it steps: it scales every micro-batch and unscales at every step."""
        if isinstance(self._mode, Counting):
            raise WindowError(
                "GradScaler: it unscales and checks at every step(), but with accumulation_steps most calls only take "
                "a micro-batch. Use boundary mode (leave accumulation_steps out and call scaler.step once per logical "
                "batch), or train in bf16, which needs no loss scale."
            )
        return False

    @property
    def backend(self) -> str:
        """Name of the backend that serves the parameters."""
        return self._engine.backend.__name__.rpartition(".")[2]
