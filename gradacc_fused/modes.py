"""What ``step()`` means: a boundary each time, or every k-th time. Windows in a ``with`` block are apart from both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .engine import Piece
from .errors import WindowError
from .micro_batches import Declared, MicroBatches
from .results import Scalar

if TYPE_CHECKING:
    from .optimizer import GradAccumOptimizer


class Boundary:
    """Every ``step()`` is a boundary; autograd itself accumulates in ``.grad``, which stays visible.

    What autograd has summed cannot be weighted afterwards: the weight multiplies the loss before its backward.
    """

    def __init__(self, optimizer: GradAccumOptimizer) -> None:
        self._optimizer = optimizer
        self._window: MicroBatches | None = None  # open while opt.backward() has declared micro-batches
        self._failed = ""

    micro_batches = 0  # the sum so far is the host's own .grad: nothing of ours is open
    held: Sequence[Piece] = ()

    def backward(self, declared: Declared) -> None:
        self._refuse_failed("backward")
        window = self._window or MicroBatches(self._optimizer, "backward", status="open")
        weight = window.check(declared)
        self._refuse_others_grads(window)
        factor = window.factor(declared.reduction, weight)
        factor = float(factor)  # a device weight syncs here: 0 has to select nothing, not to multiply
        if factor != 0.0:  # else: not read, so not run
            try:
                window.run_backward(declared.loss, factor)
            except BaseException as error:
                self._failed = f"backward of micro-batch {window.micro_batches} raised {type(error).__name__}"
                raise
        window.record(declared, weight)
        self._optimizer._engine.collector.remember_grads()
        self._window = window

    def _refuse_failed(self, where: str) -> None:
        if self._failed:
            failed, self._failed = self._failed, ""
            raise WindowError(
                f"{where}: the logical batch is not complete: {failed}. Its gradients were cleared and nothing was "
                "applied. Start the logical batch anew."
            )

    def _refuse_others_grads(self, window: MicroBatches) -> None:
        """Between two opt.backward calls nobody else may write ``.grad``: the weights would no longer be its."""
        collector = self._optimizer._engine.collector
        first = window.micro_batches == 0
        if not (collector.first_with_grad() < 0 if first else collector.grads_unchanged()):
            self._optimizer._clear_grads()
            raise WindowError(
                f"backward: .grad was written or cleared by somebody else before micro-batch {window.micro_batches}, "
                "so the declared weights are not those of its sum. The micro-batches are discarded and .grad cleared. "
                "Call opt.zero_grad(set_to_none=True) at the start of a logical batch, and nothing that writes .grad "
                "until the last one."
            )

    def step(self, declared: Declared) -> None:
        if declared.weight is not None:
            raise ValueError(
                "step: weight needs accumulation_steps with weighting='given'. Without them autograd has already "
                "summed the micro-batches: weigh them in opt.window() or opt.backward()."
            )
        self._refuse_failed("step")
        window = self._window
        if window is None:
            window = MicroBatches(self._optimizer, "step", status="open")
            if self._optimizer._engine.collector.first_with_grad() < 0:
                return  # as torch: a step without gradients changes nothing
            window.record(declared, 1.0)
        elif any(said is not None for said in (declared.loss, declared.samples, declared.tokens)):
            raise ValueError("step: loss, samples and tokens were for opt.backward() to say, for each micro-batch.")
        self._window = None
        window.take_summed()
        self._optimizer._commit(window)

    def flush(self) -> bool:
        if self._window is None:
            return False
        self.step(Declared())
        return True

    def forget_untaken(self) -> None:
        """``.grad`` was cleared: what was summed in it is gone."""
        self._window, self._failed = None, ""

    def discard(self, why: str) -> None:
        self.forget_untaken()

    def saved_window(self, where: str) -> None:
        """No window of ours is open: what was summed is the host's own ``.grad``."""

    def check_restored_window(self, micro_batches: int) -> None:
        raise ValueError(
            f"load_state_dict: the state dict holds an open window of {micro_batches} micro-batch(es), and this "
            "optimizer does not count. Build it with the accumulation_steps it was saved with. Nothing was loaded."
        )


class Counting:
    """Every k-th ``step()`` is the real one; each takes the gradients of one micro-batch."""

    def __init__(self, optimizer: GradAccumOptimizer, steps: int) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self._window: MicroBatches | None = None
        self._declared: Declared | None = None  # by opt.backward(), for the step() that follows
        self._failed = ""
        optimizer._engine.watch_backward()

    @property
    def micro_batches(self) -> int:
        """Micro-batches in the open window."""
        return 0 if self._window is None else self._window.micro_batches

    @property
    def held(self) -> Sequence[Piece]:
        """Gradients that the open window holds."""
        return () if self._window is None else self._window.held

    def _open_window(self) -> MicroBatches:
        if self._window is None or self._window.status != "open" or self._window.micro_batches == 0:
            return self.new_window()
        return self._window

    def new_window(self) -> MicroBatches:
        """An open window without micro-batches, which the next ones join."""
        self._window = MicroBatches(self._optimizer, "step", status="open", closes_after=self._steps)
        return self._window

    def saved_window(self, where: str) -> MicroBatches | None:
        """The window that a state dict takes along; None where nothing was taken yet."""
        if self._declared is not None:
            raise WindowError(
                f"{where}: micro-batch {self.micro_batches} was not taken by step() yet. Call step() first, or "
                "zero_grad() to drop it."
            )
        return self._window if self.micro_batches else None

    def check_restored_window(self, micro_batches: int) -> None:
        """Whether a window of so many micro-batches can go on here."""
        if micro_batches >= self._steps:
            raise ValueError(
                f"load_state_dict: the state dict holds an open window of {micro_batches} micro-batches, and "
                f"accumulation_steps is {self._steps}. Build the optimizer with what it was saved with. Nothing was "
                "loaded."
            )

    def _check(self, window: MicroBatches, declared: Declared) -> tuple[Declared, Scalar]:
        """What was declared, with the weight that ``weighting`` gives it."""
        weighting = self._optimizer.options.weighting
        if weighting == "equal" and declared.weight is not None:
            raise ValueError(
                "step: weight was given but weighting='equal' counts every micro-batch alike. Use weighting='given'."
            )
        if weighting == "given" and declared.weight is None:
            window.require_weight()
        if declared.weight is None:
            declared = Declared(1.0, declared.reduction, declared.loss, declared.samples, declared.tokens)
        return declared, window.check(declared)

    def _refuse_unfinished_backward(self) -> None:
        if self._optimizer._engine.unfinished_backward():
            count = self.micro_batches
            self._optimizer.discard()
            raise WindowError(
                f"step: the backward of micro-batch {count} began and did not finish; its gradients are partial. The "
                "window is discarded and .grad cleared; nothing was applied. Start the logical batch anew."
            )

    def backward(self, declared: Declared) -> None:
        window = self._open_window()
        self._check(window, declared)
        self._refuse_unfinished_backward()
        if self._declared is not None:
            raise WindowError(
                f"backward: micro-batch {self.micro_batches} was not taken by step() yet. Call step() after each one."
            )
        if self._optimizer._engine.collector.first_with_grad() >= 0:
            self._refuse_others_grad("backward")
        try:
            window.run_backward(declared.loss)
        except BaseException as error:
            self._failed = f"backward of micro-batch {window.micro_batches} raised {type(error).__name__}"
            raise
        self._failed = ""
        self._declared = declared
        self._optimizer._engine.collector.remember_grads()

    def _refuse_others_grad(self, where: str) -> None:
        count = self.micro_batches
        self._optimizer.discard()
        raise WindowError(
            f"{where}: somebody else wrote .grad beside opt.backward() of micro-batch {count}; nobody can say what it "
            "weighs. The window is discarded and .grad cleared. Run every backward of a micro-batch through "
            "opt.backward(), and call opt.zero_grad(set_to_none=True) before the first."
        )

    def step(self, declared: Declared) -> None:
        window = self._open_window()
        said = self._declared
        if said is not None:
            if declared.weight is not None:
                raise ValueError("step: weight was given to opt.backward() already; give it once.")
            if not self._optimizer._engine.collector.grads_unchanged():
                self._refuse_others_grad("step")
            declared = Declared(
                said.weight, said.reduction, said.loss if declared.loss is None else declared.loss,
                said.samples if declared.samples is None else declared.samples,
                said.tokens if declared.tokens is None else declared.tokens,
            )  # fmt: skip
        declared, weight = self._check(window, declared)
        self._refuse_unfinished_backward()
        window.make_room()
        window.take(declared, weight, self._failed)
        self._declared, self._failed = None, ""
        if window.micro_batches >= self._steps:
            self._window = None
            self._optimizer._commit(window)

    def flush(self) -> bool:
        self._refuse_unfinished_backward()
        index = self._optimizer._engine.collector.first_with_grad()
        if self._declared is not None or index >= 0:
            raise WindowError(
                f"flush: micro-batch {self.micro_batches} was not taken (parameter {max(index, 0)} has a .grad). Call "
                "step() after its backward, or zero_grad() to drop it, and flush() then."
            )
        window, self._window = self._window, None
        if window is None or window.micro_batches == 0:
            return False
        self._optimizer._commit(window)
        return True

    def forget_untaken(self) -> None:
        """``.grad`` was cleared: the micro-batch that was in it is gone, those taken before are not."""
        self._declared, self._failed = None, ""

    def discard(self, why: str) -> None:
        if self._window is not None:
            self._window.discard(why)
        self._window = None
        self.forget_untaken()
