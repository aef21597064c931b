"""A logical batch in uneven pieces, with three loss terms of different denominators, and memory that runs out in one.

plan -> window -> restore, on the demo's text: ``python examples/exact_batches.py``. The gradient of the step is
compared with that of the whole batch at once, in plain torch; the last line is JSON.
"""

from __future__ import annotations

import copy
import json
import math

import torch
from torch.nn import functional

import gradacc_fused as gf
from gradacc_fused.demo import text
from gradacc_fused.demo.model import GPT

SAMPLES, LONGEST, MAX_TOKENS = 24, 96, 480
TERMS = {
    "cross_entropy": "active_tokens",
    "kl": gf.Term("samples", coefficient=0.1),
    "z_loss": gf.Term("letters", coefficient=1e-3),
}


class KeepsGradients(torch.optim.SGD):
    """SGD that shows the gradient it was given: a subclass runs its own step, on what the window has accumulated."""

    def step(self, closure=None):
        self.seen = [param.grad.clone() for group in self.param_groups for param in group["params"]]
        return super().step(closure)


def letters(labels: torch.Tensor) -> torch.Tensor:
    """Which positions predict a letter: a denominator of our own."""
    lower = labels | 32
    return (lower >= ord("a")) & (lower <= ord("z")) & (labels != text.IGNORED)


def terms_of(
    model: GPT, other: GPT, inputs: torch.Tensor, labels: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The three sums, and the cross entropy of each sample."""
    logits = model(inputs)
    active = labels != text.IGNORED
    each = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=text.IGNORED, reduction="none")
    with torch.no_grad():
        target = other(inputs).log_softmax(-1)
    kl = functional.kl_div(logits.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
    z = logits.logsumexp(-1).square()
    losses = {
        "cross_entropy": each.sum(),
        "kl": (kl * active).sum(),
        "z_loss": (z * letters(labels)).sum(),
    }
    return losses, each.sum(1)


def whole_batch(model: GPT, other: GPT, samples: list[bytes]) -> tuple[list[torch.Tensor], torch.Tensor, float]:
    """Gradient, loss of each sample, and loss: one backward over everything, the denominators written out."""
    inputs, labels = text.tensors(samples)
    losses, each = terms_of(model, other, inputs, labels)
    loss = losses["cross_entropy"] / (labels != text.IGNORED).sum()
    loss = loss + 0.1 * losses["kl"] / len(samples) + 1e-3 * losses["z_loss"] / letters(labels).sum()
    loss.backward()
    return [param.grad for param in model.parameters()], each.detach(), float(loss.detach())


def relative(ours: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    gap = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, truth, strict=True))
    return math.sqrt(gap / sum(float(b.double().square().sum()) for b in truth))


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model, other = GPT(longest=LONGEST), GPT(longest=LONGEST)
    whole = copy.deepcopy(model)
    samples = text.paragraphs(LONGEST)[:SAMPLES]
    labels = [text.tensors([sample])[1] for sample in samples]
    plan = gf.plan_batch(
        [len(sample) - 1 for sample in samples],
        limits=gf.Limits(max_samples=10, max_tokens=MAX_TOKENS),
        counts={
            "active_tokens": [int((label != text.IGNORED).sum()) for label in labels],
            "letters": [int(letters(label).sum()) for label in labels],
        },
        strategy="balanced",
    )
    print(f"{SAMPLES} samples in {len(plan.pieces)} pieces; totals before the first: {dict(plan.totals)}")
    for piece in plan.pieces:
        print(f"  piece {piece.index}: samples {piece.samples}, tensors of {piece.shape}, counts {dict(piece.counts)}")

    runs: list[int] = []

    def forward(piece) -> gf.PieceOutput:
        runs.append(len(piece.samples))
        losses, each = terms_of(model, other, *text.tensors([samples[sample] for sample in piece.samples]))
        if piece.index == 2 and len(piece.samples) > 2:  # the failure: in the middle of its backward
            losses["kl"].register_hook(out_of_memory)
        return gf.PieceOutput(losses, outputs=each)

    def out_of_memory(gradient: torch.Tensor) -> None:
        print(f"  out of memory in the backward of {runs[-1]} samples")
        raise torch.OutOfMemoryError("planned")

    inner = KeepsGradients(model.parameters(), lr=0.1)
    opt = gf.GradAccumOptimizer(inner)
    with opt.window(plan, terms=TERMS, restore_state=True) as window:
        outputs = [window.run(piece, forward, split_on_oom=True) for piece in plan.pieces]
    restored = plan.restore(outputs)

    gradients, each, loss = whole_batch(whole, other, samples)
    result = opt.last_result
    numbers = {
        "grad_rel_diff": relative(inner.seen, gradients),
        "loss_rel_diff": abs(float(result.loss_mean) - loss) / loss,
        "output_rel_diff": relative([restored], [each]),
        "pieces": len(plan.pieces),
        "micro_batches": result.micro_batches,
        "samples": result.samples,
    }
    print(f"terms of the logical batch: { {name: round(float(value), 6) for name, value in result.terms.items()} }")
    print(f"loss {float(result.loss_mean):.8f}, whole batch {loss:.8f}")
    print(f"gradient against the whole batch: {numbers['grad_rel_diff']:.2e} relative (bound 1e-6)")
    print(gf.explain(opt))
    print(json.dumps(numbers))
    return numbers


if __name__ == "__main__":
    main()
