"""Ways to train the demo's GPT for one window: forward and backward alone, ours, and stock torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

import gradacc_fused as gf
from gradacc_fused.demo import text
from gradacc_fused.demo.model import GPT

from . import study
from .paths import MAX_NORM

K = 4
LR = 1e-4


@dataclass(frozen=True)
class Piece:
    """One micro-batch: int64 [1, length] inputs and labels, and how many labels count."""

    inputs: torch.Tensor
    labels: torch.Tensor
    tokens: int


def make_pieces(longest: int, k: int = K, seed: int = 0) -> list[Piece]:
    """``k`` micro-batches of one paragraph each, at least half as long as the longest."""
    samples = [sample for sample in text.paragraphs(longest, seed) if len(sample) > longest // 2]
    pairs = [text.tensors([sample]) for sample in samples[:k]]
    return [Piece(inputs, labels, int((labels != text.IGNORED).sum())) for inputs, labels in pairs]


class Loop:
    """Forward and backward alone; the gradients are dropped.

    Args:
        model: Of its own. Written by the paths that update.
        pieces: The micro-batches of a window.
        native: Whether the matrix products run in the parameters' dtype.
    """

    name = "forward/backward"
    defer = "-"

    def __init__(self, model: GPT, pieces: Sequence[Piece], native: bool = False) -> None:
        self.model = model
        self.pieces = pieces
        self.named = dict(model.named_parameters())
        self.params = list(self.named.values())
        self.native = native or self.params[0].dtype == torch.float32
        self.main_params: list[torch.Tensor] = list(self.params)
        self.tokens = sum(piece.tokens for piece in pieces)
        self.model_watch = study.Stopwatch()  # runs in forward and in backward

    def loss_sum(self, piece: Piece) -> torch.Tensor:
        """Cross entropy summed over the active tokens, in fp32."""
        with self.model_watch:
            if self.native:
                logits = self.model(piece.inputs).float()
            else:
                wide = {name: param.float() for name, param in self.named.items()}
                logits = torch.func.functional_call(self.model, wide, (piece.inputs,))
            return functional.cross_entropy(
                logits.flatten(0, 1), piece.labels.flatten(), ignore_index=text.IGNORED, reduction="sum"
            )

    def take(self) -> list[torch.Tensor]:
        """Read ``.grad`` of every parameter and clear it."""
        grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        return grads  # type: ignore[return-value]

    def window(self) -> None:
        for piece in self.pieces:
            self.loss_sum(piece).backward()
            self.take()


class Ours(Loop):
    """``opt.window()``, each micro-batch with its number of active tokens."""

    def __init__(self, model: GPT, pieces: Sequence[Piece], native: bool = False, defer: int | str = 1) -> None:
        super().__init__(model, pieces, native)
        self.name, self.defer = f"ours, defer={defer}", str(defer)
        self.optimizer = gf.GradAccumOptimizer(
            torch.optim.AdamW(self.params, lr=LR), max_grad_norm=MAX_NORM, defer=defer  # type: ignore[arg-type]
        )  # fmt: skip
        state = self.optimizer.state
        self.main_params = [state[param].get("main_param", param) for param in self.params]

    def window(self) -> None:
        with self.optimizer.window() as window:
            for piece in self.pieces:
                window.backward(self.loss_sum(piece), weight=piece.tokens, reduction="sum")


class StockLoop(Loop):
    """torch's foreach operators, ``clip_grad_norm_`` and fused AdamW; the number of active tokens is known beforehand.

    bf16 parameters have fp32 main params and fp32 main grads, which are zeroed and added to; ``alpha`` divides by the
    tokens, in fp32 and for nothing. With fp32 parameters the loss is divided, the first micro-batch's gradients are the
    sums themselves, and nothing is copied back.
    """

    name = "stock"

    def __init__(self, model: GPT, pieces: Sequence[Piece], native: bool = False) -> None:
        super().__init__(model, pieces, native)
        self.low_precision = self.params[0].dtype != torch.float32
        if self.low_precision:
            self.main_params = [param.detach().float() for param in self.params]
            self.main_grads = [torch.empty_like(main_param) for main_param in self.main_params]
        self.optimizer = torch.optim.AdamW(self.main_params, lr=LR, fused=True)

    def window(self) -> None:
        for number, piece in enumerate(self.pieces):
            loss = self.loss_sum(piece)
            (loss if self.low_precision else loss * (1.0 / self.tokens)).backward()
            with torch.no_grad():
                self.add(self.take(), number == 0)
        with torch.no_grad():
            for main_param, main_grad in zip(self.main_params, self.main_grads, strict=True):
                main_param.grad = main_grad
            torch.nn.utils.clip_grad_norm_(self.main_params, MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.low_precision:
                torch._foreach_copy_(self.params, self.main_params)
            else:
                self.main_grads = []

    def add(self, grads: list[torch.Tensor], first: bool) -> None:
        if self.low_precision:
            if first:
                torch._foreach_zero_(self.main_grads)
            torch._foreach_add_(self.main_grads, grads, alpha=1.0 / self.tokens)
        elif first:
            self.main_grads = grads
        else:
            torch._foreach_add_(self.main_grads, grads)


def make_loops(model: GPT, pieces: Sequence[Piece], native: bool = False) -> list[Loop]:
    """Forward and backward alone, ours with the largest and the smallest ``defer``, and stock; the same start."""
    most = "auto" if study.accepts_auto_defer() else len(pieces)
    return [
        Loop(copy.deepcopy(model), pieces, native),
        *(Ours(copy.deepcopy(model), pieces, native, defer) for defer in (most, 1)),
        StockLoop(copy.deepcopy(model), pieces, native),
    ]
