"""Real text that every Python ships: the documentation topics of pydoc, as bytes, in paragraphs of all lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch

IGNORED = -100  # label of a position that is no active token
SHORTEST = 12


def paragraphs(longest: int, seed: int = 0) -> list[bytes]:
    """All paragraphs of at least ``SHORTEST`` bytes, cut at ``longest`` + 1, in a shuffled order."""
    cut = [
        " ".join(paragraph.split()).encode()[: longest + 1]
        for _, text in sorted(topics.items())
        for paragraph in text.split("\n\n")
    ]
    kept = [paragraph for paragraph in cut if len(paragraph) > SHORTEST]
    random.Random(seed).shuffle(kept)
    return kept


def logical_batches(samples: list[bytes], size: int, count: int) -> Iterator[list[bytes]]:
    """``count`` logical batches of ``size`` samples, walking the samples round and round."""
    for number in range(count):
        yield [samples[(number * size + k) % len(samples)] for k in range(size)]


def split(batch: list[bytes], shares: tuple[int, ...]) -> list[list[bytes]]:
    """Micro-batches of ``shares`` samples; the batch is sorted by length first, so their tokens are uneven too."""
    ordered = sorted(batch, key=len)
    pieces, start = [], 0
    for share in shares:
        pieces.append(ordered[start : start + share])
        start += share
    return pieces


def tensors(samples: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, labels), int64 [samples, longest]: next-byte prediction, padded on the right with ``IGNORED`` labels."""
    length = max(len(sample) for sample in samples) - 1
    inputs = torch.zeros(len(samples), length, dtype=torch.int64)
    labels = torch.full((len(samples), length), IGNORED, dtype=torch.int64)
    for row, sample in enumerate(samples):
        values = torch.frombuffer(bytearray(sample), dtype=torch.uint8).long()
        inputs[row, : len(sample) - 1] = values[:-1]
        labels[row, : len(sample) - 1] = values[1:]
    return inputs, labels
