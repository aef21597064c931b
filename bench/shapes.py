"""Parameter lists of real models, as shapes derived from their architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Shape = tuple[int, ...]


def small() -> list[Shape]:
    """Many small tensors: what an operator call costs, rather than what a byte costs."""
    return [(2080,)] * 400


def lora() -> list[Shape]:
    """128 low-rank factors of rank 8 on a model of width 1024."""
    return [(8, 1024)] * 128


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, positions: int = 1024) -> list[Shape]:
    """GPT-2 124M. The output head is the token embedding and counts once."""

    def linear(inputs: int, outputs: int) -> list[Shape]:
        return [(inputs, outputs), (outputs,)]  # stored inputs first, as GPT-2's Conv1D has them

    norm: list[Shape] = [(width,), (width,)]
    attention = [*norm, *linear(width, 3 * width), *linear(width, width)]
    feed_forward = [*norm, *linear(width, 4 * width), *linear(4 * width, width)]
    return [(vocabulary, width), (positions, width), *(attention + feed_forward) * layers, *norm]


def resnet50(classes: int = 1000) -> list[Shape]:
    """ResNet-50 as torchvision has it: bottlenecks of expansion 4, convolutions without bias."""

    def convolution(inputs: int, outputs: int, kernel: int) -> list[Shape]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]  # weight; weight and bias of its batch norm

    shapes = convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * width
        for block in range(blocks):
            shapes += convolution(inputs, width, 1) + convolution(width, width, 3) + convolution(width, outputs, 1)
            if block == 0:
                shapes += convolution(inputs, outputs, 1)  # the shortcut changes width
            inputs = outputs
    return [*shapes, (classes, inputs), (classes,)]


PARAMETER_LISTS: dict[str, Callable[[], list[Shape]]] = {
    "small": small,
    "lora": lora,
    "gpt2": gpt2,
    "resnet50": resnet50,
}


def elements(shapes: Sequence[Shape]) -> int:
    """Elements in all tensors together."""
    return sum(math.prod(shape) for shape in shapes)
