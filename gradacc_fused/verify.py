"""Whether splitting changes a loss's gradient: the same logical batch in one piece and as planned, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .attempts import Losses, PieceOutput
from .batch.denominators import Declaration, LogicalBatch, Term, declared_terms
from .batch.plan import Piece, Plan
from .batch.planner import Limits, plan_batch
from .batch.saved_state import SavedState
from .modules import buffers_of

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SplitCheck:
    """What ``check_split`` found; ``str()`` says it in a sentence.

    Attributes:
        pieces: Of the plan.
        ratio: Split gradient over the whole batch's, along the latter: 1 where they agree; k or 1/k for k pieces is a
            denominator that is each piece's own.
        rel_diff: Norm of the difference over the norm of the whole batch's gradient.
        first: Name of the first parameter whose gradient differs by more than the tolerance; "" if none does.
        loss_whole: Loss of the whole batch, divided as declared.
        loss_split: Of the split one.
        tolerance: Of ``rel_diff``, and of each parameter's gradient.
    """

    pieces: int
    ratio: float
    rel_diff: float
    first: str
    loss_whole: float
    loss_split: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the gradients agree."""
        return self.rel_diff <= self.tolerance

    def __str__(self) -> str:
        found = f"{self.pieces} pieces: gradient ratio {self.ratio:.6g}, relative difference {self.rel_diff:.3g}"
        if self.equal:
            return f"{found}: the split does not matter"
        why = f"{found}: the split changes the gradient, first in {self.first!r}"
        if abs(self.ratio - self.pieces) < 1e-3 * self.pieces:
            return f"{why}. The ratio is the number of pieces: each piece's loss is divided by its own count"
        if abs(self.ratio * self.pieces - 1) < 1e-3:
            return f"{why}. The ratio is 1 / the number of pieces: somebody divides by it once more"
        return f"{why}. Look at means of uneven pieces, batch statistics, dropout, and losses across samples"


def check_split(
    fn: Callable[[Piece], Losses | PieceOutput],
    plan: Plan,
    model: torch.nn.Module,
    *,
    terms: Declaration | None = None,
    tolerance: float = 1e-6,
) -> SplitCheck:
    """Compare the gradient of a planned logical batch with that of the whole batch in one piece.

    Args:
        fn: As for ``Window.run``: the loss of a piece, or one per term. It is called with the plan's pieces and with
            one that holds every sample.
        plan: How the batch is split; all ranks' pieces are run here.
        model: Whose gradients are compared; its ``.grad`` is neither read nor written.
        terms: As for ``GradAccumOptimizer.window``.
        tolerance: Relative norm up to which gradients agree: 1e-6 for fp32, more for lower precision.

    Returns:
        What was found; nothing was stepped, and random-number generators and the model's buffers are as they were.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not named:
        raise ValueError("check_split: model must have a parameter that requires grad, got none.")
    one_piece = plan_batch(
        plan.lengths, limits=Limits(layout="packed" if plan.packed else "padded"), counts=plan.counts
    )
    declared = declared_terms(terms)
    if declared is not None:  # those across samples too: their difference is what is asked for
        declared = {name: replace(term, across_samples=False) for name, term in declared.items()}
    before = SavedState(buffers_of(model.modules()), next(iter(named.values())).device)
    try:
        whole, loss_whole = _gradient(fn, one_piece, named, declared)
        before.restore()  # the same random numbers and statistics for both
        split, loss_split = _gradient(fn, plan, named, declared)
    finally:
        before.restore()
    norm = sum(float(gradient.square().sum()) for gradient in whole.values())
    dot = sum(float((whole[name] * split[name]).sum()) for name in whole)
    gap = sum(float((whole[name] - split[name]).square().sum()) for name in whole)
    return SplitCheck(
        pieces=sum(not piece.padding for piece in plan.pieces),
        ratio=dot / norm if norm else float(gap == 0),
        rel_diff=(gap / norm) ** 0.5 if norm else float(gap > 0),
        first=next((name for name in whole if not _close(split[name], whole[name], tolerance)), ""),
        loss_whole=loss_whole,
        loss_split=loss_split,
        tolerance=tolerance,
    )


def _close(split: torch.Tensor, whole: torch.Tensor, tolerance: float) -> bool:
    return float((split - whole).norm()) <= tolerance * float(whole.norm())


def _gradient(
    fn: Callable[[Piece], Losses | PieceOutput],
    plan: Plan,
    named: dict[str, torch.nn.Parameter],
    terms: dict[str, Term] | None,
) -> tuple[Gradients, float]:
    """The float64 sum of the pieces' gradients, divided as declared, and the loss."""
    batch = LogicalBatch(terms, plan)
    total = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in named.items()}
    loss = 0.0
    divisor = 1.0 if not batch.denominator else batch.denominator / batch.unit
    for piece in plan.pieces:
        with torch.enable_grad():
            made = fn(piece)
        combined = batch.combine(made.loss if isinstance(made, PieceOutput) else made, piece, {}, "check_split")
        if combined.weight == 0.0:
            continue
        gradients = torch.autograd.grad(combined.loss, list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient.to(torch.float64) / divisor
        loss += float(combined.loss.detach().to(torch.float64)) / divisor
    return total, loss
