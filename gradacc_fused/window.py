"""The window of a ``with`` block: all of its pieces become one step, or nothing moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .attempts import Attempts, Losses, PieceOutput, Ready
from .batch.denominators import Combined, LogicalBatch
from .batch.ledger import Ledger
from .batch.out_of_memory import is_out_of_memory
from .batch.plan import Piece, Plan
from .batch.saved_state import SavedState
from .batch_norm import running_statistics
from .errors import WindowError
from .micro_batches import Declared, MicroBatches
from .modules import buffers_of, ranks_averaged
from .results import LossRecord, Scalar

if TYPE_CHECKING:
    from .optimizer import GradAccumOptimizer

DISCARDED = "discard() was called"
NOTE = "gradacc_fused:"


class Window(MicroBatches):
    """Collects micro-batches and commits them as one step; an exception in its block discards them.

    Made by ``GradAccumOptimizer.window()``::

        with opt.window() as window:
            for piece in pieces:
                loss_sum, n_active = model_loss(piece)
                window.backward(loss_sum, weight=n_active, reduction="sum")

    A window is ``open`` until it is committed, discarded, or something in it fails; nothing is applied before commit.

    Args:
        optimizer: Whose window it is.
        batch: Declared loss terms and the plan, if there are any.
        rank: Whose pieces of the plan it runs.
        restore_state: Whether a discarded window puts back random-number generators and running statistics; a module:
            and all of its buffers.
    """

    def __init__(
        self,
        optimizer: GradAccumOptimizer,
        batch: LogicalBatch | None = None,
        rank: int = 0,
        restore_state: bool | torch.nn.Module = False,
    ) -> None:
        super().__init__(optimizer, "window", status="new")
        self._batch = batch
        self._plan: Plan | None = None if batch is None else batch.plan
        self.ledger = None if self._plan is None else Ledger(self._plan, rank)
        self._restore_state = restore_state
        self._buffers: Sequence[tuple[torch.nn.Module, str]] = ()
        self._saved: SavedState | None = None
        self.retries = False  # whether running out of memory leaves the window open
        self.short_of_memory = False

    # -- the with block ------------------------------------------------------------------------------------------

    def __enter__(self) -> Window:
        if self.status != "new":
            raise WindowError(f"window: this one is {self.status}; a window is used once. Call opt.window() again.")
        self._optimizer._enter_window(self)
        try:
            self._begin()
            self._engine.collector.mark()
            self._find_buffers()
            self._saved = self.save_state()
        except BaseException:
            self._optimizer._leave_window(self)
            raise
        self._refuse_stale_grads("opened")
        self._engine.forget_unfinished_backward()  # whatever it wrote is gone
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._optimizer._leave_window(self)
        if error is not None:
            self.fail(error, f"{type(error).__name__} was raised in it")
            return
        if self.status == "discarded" and self._why == DISCARDED:
            return  # by the caller, who knows
        try:
            self._require_open("committed")
            self._refuse_stale_grads("committed")
            self._refuse_written_params()
            self._refuse_incomplete()
            if self.micro_batches > 0:
                self._optimizer._commit(self)
                return
        except BaseException as failure:
            self.fail(failure, f"{type(failure).__name__} was raised where it was committed")
            raise
        self.status = "committed"
        warnings.warn("the window closed without a micro-batch; no step was made.", stacklevel=2)

    def fail(self, error: BaseException, why: str) -> None:
        """Discard the window for an error, and say so in it."""
        if self.status == "committed":
            if hasattr(error, "add_note"):
                error.add_note(f"{NOTE} raised while its step was applied, or after: parameters may have moved.")
            return
        if hasattr(error, "add_note") and not any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
            where = "" if self.ledger is None else f" The piece in hand was {self.ledger.position()}."
            error.add_note(f"{NOTE} its window is discarded, nothing was applied, .grad is cleared.{where}")
        self.discard(why)
        self._optimizer._clear_grads()

    def discard(self, why: str = "") -> None:
        """Drop everything taken so far. Nothing moves; the next window starts from zero."""
        was_open = self.status == "open"
        super().discard(why)
        if was_open and self._saved is not None:
            self._saved.restore()

    def _find_buffers(self) -> None:
        model = self._restore_state
        if isinstance(model, torch.nn.Module):
            self._buffers = buffers_of(model.modules())
        elif model:
            self._buffers = running_statistics(self._engine.layout.params)

    def save_state(self) -> SavedState | None:
        """Generators and running statistics as they are, where the window restores them."""
        if not self._restore_state:
            return None
        return SavedState(self._buffers, self._engine.layout.device)

    # -- what discards it ----------------------------------------------------------------------------------------

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

    def _refuse_written_params(self) -> None:
        index = self._engine.collector.first_written()
        if index >= 0:
            self._give_up(
                f"parameter {index} was written",
                f"parameter {index} was written since the window opened (before micro-batch {self.micro_batches}), so "
                "its gradients would be those of different models. Load, average or step parameters between windows.",
            )

    def _refuse_incomplete(self) -> None:
        if self.ledger is not None:
            self.refuse(self.ledger.missing() or self.ledger.late_broken_promise())

    def refuse(self, why: str) -> None:
        if why:
            self._give_up(why, f"{why}.")

    # -- micro-batches -------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Losses,
        *,
        weight: float | torch.Tensor | None = None,
        reduction: str | None = None,
        samples: Scalar | None = None,
        tokens: Scalar | None = None,
        piece: Piece | None = None,
        counts: Mapping[str, Scalar] | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        """Run one micro-batch's backward and take its gradients.

        The step sees ``sum_i(w_i * g_i) / sum_i(w_i)`` with mean losses, ``sum_i(g_i) / sum_i(w_i)`` with sums; with
        declared terms what they declare (see ``batch/denominators.py``).

        Args:
            loss: The micro-batch's loss, one element; where terms were declared, one per term.
            weight: How much of the logical batch it is: active tokens, samples; a number or a one-element tensor,
                finite and >= 0 (on a device that is not checked: it would cost a sync). 0 means that neither its
                gradient nor its loss is read. May be left out only if the window has a single micro-batch. Not with
                declared terms.
            reduction: "mean" (default) if ``loss`` is a mean over ``weight`` items, "sum" if it is their sum. Not with
                declared terms.
            samples: Samples in it, for the result.
            tokens: Tokens in it, for the result.
            piece: With a plan: which piece this is.
            counts: With declared terms and no plan: what the micro-batch counts, numbers or one-element tensors. With a
                plan: what was really counted; the plan's counts must be met.
            loss_scale: What somebody has multiplied the loss by (``GradScaler.get_scale()``); the step, the norm and
                the logged loss are in true units. The same for all micro-batches of a window.

        Raises:
            DenominatorError: No weight and more than one micro-batch, a weight that is no finite number >= 0, or a term
                that nobody declared.
            WindowError: The window is not open, a parameter was written or has a ``.grad`` from elsewhere, the piece is
                not the one whose turn it is, its counts are not the planned ones, the loss scale changed. The window is
                discarded.
            Exception: Whatever backward raised; the window is discarded and the half-written ``.grad`` cleared.
        """
        self._require_open("used")
        declared = Declared(weight, reduction or "mean", loss, samples, tokens, loss_scale)
        ready = self.prepare(loss, piece, counts, declared, reduction)
        try:
            self.make_room()
            self.run_backward(ready.declared.loss, weight=ready.weight)
            self.take_ready(ready)
        except WindowError:
            raise  # says itself what became of the window
        except BaseException as error:
            self.fail(error, f"{type(error).__name__} was raised in micro-batch {self.micro_batches}")
            raise

    def prepare(
        self,
        loss: Losses,
        piece: Piece | None,
        counts: Mapping[str, Scalar] | None,
        declared: Declared,
        reduction: str | None,
    ) -> Ready:
        """Check everything that was said of a micro-batch, before anything is touched."""
        if self.ledger is not None:
            self._refuse_written_params()  # so that the error names the piece; other windows ask where they commit
        combined = None
        if self._batch is None:
            if piece is not None or counts is not None or isinstance(loss, Mapping):
                raise ValueError(
                    "window: piece, counts and losses by term need opt.window(plan) or opt.window(terms=...), got none."
                )
        else:
            if declared.weight is not None or reduction is not None:
                raise ValueError("window: weight and reduction are what terms declare; leave them out of backward.")
            piece, combined, declared = self._combine(self._batch, loss, piece, counts, declared)
        weight = self.check(declared)
        self._refuse_stale_grads("used")
        return Ready(declared, weight, piece, combined)

    def _combine(
        self,
        batch: LogicalBatch,
        loss: Losses,
        piece: Piece | None,
        counts: Mapping[str, Scalar] | None,
        declared: Declared,
    ) -> tuple[Piece | None, Combined, Declared]:
        if (piece is None) != (self.ledger is None):
            expected = "which piece it is: piece=..." if piece is None else "no piece, the window having no plan"
            raise ValueError(f"window: backward must be told {expected}.")
        seen: Mapping[str, Scalar] = {name.removeprefix("total_"): count for name, count in (counts or {}).items()}
        for name, count in seen.items():
            if not isinstance(count, (int, float, torch.Tensor)):
                raise TypeError(f"window: counts[{name!r}] must be a number or a tensor, got {type(count).__name__}.")
        if not (piece is None or isinstance(piece, Piece)):
            raise TypeError(f"window: piece must be one of plan.pieces, got {type(piece).__name__}.")
        if self.ledger is not None and piece is not None:
            self.refuse(self.ledger.unexpected(piece) or self.ledger.broken_promise(piece, seen))
            seen = piece.counts
        elif batch.across_samples and self.micro_batches > 0:
            self.refuse(
                f"term {batch.across_samples[0]!r} compares samples with each other, and this is micro-batch "
                f"{self.micro_batches}: each would see only its own samples. Run the logical batch in one"
            )
        combined = batch.combine(loss, piece, seen, self._where)
        several = self._plan is not None and self._plan.world_size > 1
        if several and combined.weight == 0.0 and ranks_averaged(self._engine.layout.params) > 1:
            self.refuse(
                f"piece {piece.index if piece else 0} counts nothing, and DistributedDataParallel would average its "
                "gradients into those of the other ranks. Plan so that every rank's pieces count (fewer ranks, "
                "other limits)"
            )
        samples = seen.get("samples") if declared.samples is None else declared.samples
        tokens = seen.get("active_tokens") if declared.tokens is None else declared.tokens
        said = Declared(combined.weight, combined.reduction, combined.loss, samples, tokens, declared.loss_scale)
        return piece, combined, said

    def take_ready(self, ready: Ready) -> None:
        self.take(ready.declared, ready.weight)
        if self.short_of_memory:
            self._flush_pending()
        if ready.combined is not None:
            for name, record in ready.combined.records.items():
                count = self.weights[-1] if isinstance(record.weight, torch.Tensor) else record.weight
                kept = LossRecord(self._snapshot(record.loss), count, record.reduction)
                self._terms.setdefault(name, []).append(kept)
        if self.ledger is not None and ready.piece is not None:
            self.ledger.enter(ready.piece)

    def _expected(self) -> int | None:
        return None if self.ledger is None else self.micro_batches + self.ledger.remaining

    def _outlives(self, error: BaseException) -> bool:
        return self.retries and self.status == "open" and is_out_of_memory(error)

    def run(
        self,
        piece: Piece,
        fn: Callable[[Piece], Losses | PieceOutput],
        *,
        split_on_oom: bool = False,
        loss_scale: float = 1.0,
    ) -> list[Any] | None:
        """Run one planned piece: ``fn``'s forward, and the backward of the loss it returns.

        Gradients are taken only when a backward is complete, so an attempt that ran out of memory has left nothing: its
        ``.grad`` is cleared, gradients held for one pass are added to the main grads, and the piece is tried again,
        then in halves, down to single samples. The logical batch stays the same: every sample once, with the planned
        counts.

        Args:
            piece: Of the plan, the one whose turn it is.
            fn: Called with the piece or a part of it (``piece.samples``, ``piece.shape``); returns the loss, one per
                term, or a ``PieceOutput``. It must be right to call it again.
            split_on_oom: Whether running out of memory in ``fn`` or in backward is met by splitting. With
                ``restore_state`` random-number generators and running statistics are those from before the attempt.
            loss_scale: As for ``backward``.

        Returns:
            The outputs of the piece's samples, in its order, as ``Plan.restore`` takes them; None if ``fn`` gave none.

        Raises:
            WindowError, DenominatorError: As ``backward``.
            Exception: Whatever ``fn`` or backward raised; the window is discarded. Running out of memory with a single
                sample is raised as it came, with a note.
        """
        self._require_open("used")
        if not isinstance(piece, Piece):
            raise TypeError(f"window.run: piece must be one of plan.pieces, got {type(piece).__name__}.")
        if self._plan is None:
            raise ValueError("window.run: the window has no plan. Open it with opt.window(gf.plan_batch(...)).")
        return Attempts(self, self._plan, fn, split_on_oom, loss_scale).run(piece)
