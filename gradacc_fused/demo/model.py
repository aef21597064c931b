"""A small GPT over bytes. No bias on q, k and v: a key bias's gradient is exactly zero, so in floats pure rounding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .text import IGNORED


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, length, width] -> the same; position t sees positions up to t."""
        samples, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Byte-level GPT.

    Args:
        width: Model width.
        layers: Blocks.
        heads: Attention heads.
        longest: Longest sequence.
    """

    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4, longest: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """int64 [samples, length] -> logits [samples, length, 256]."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss_sum(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy summed over the active tokens."""
        logits = self(inputs)
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )  # fmt: skip
