"""What the launches keep per device and stream: tables by their content, and scratch memory."""

from __future__ import annotations

import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from ._common import CHUNK, SLICE

MOST_TABLES = 32


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Tables:
    """int64 tables on a device, the last ones that were used; one that was used before costs a comparison, no copy.

    Args:
        device: Where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._captured: dict[tuple[int, ...], torch.Tensor] = {}  # graphs read them
        self._scratch: list[torch.Tensor] = []

    def of(self, words: tuple[int, ...]) -> torch.Tensor:
        """The words on the device. No sync: a new table is copied from pinned memory that torch keeps until then.

        Raises:
            RuntimeError: It is new, and a CUDA graph is captured.
        """
        capturing = is_capturing(self._device)
        table = self._captured.get(words)
        if table is not None:
            return table
        table = self._tables.get(words)
        if table is None:
            if capturing:
                raise RuntimeError(
                    "gradacc_fused: these tensors are new, and a CUDA graph is captured. Run one window with the same "
                    "tensors on the capturing stream before the capture."
                )
            host = torch.frombuffer(array.array("q", words), dtype=torch.int64) if words else torch.empty(0).long()
            staged = host.pin_memory() if self._device.type == "cuda" else host
            table = torch.empty(len(words), dtype=torch.int64, device=self._device)
            table.copy_(staged, non_blocking=True)
            self._tables[words] = table
            if len(self._tables) > MOST_TABLES:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(words)
        if capturing:
            self._captured[words] = table
        return table

    def scratch(self, slices: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(counters int32 [2], 0 between launches; float64, one per slice)."""
        if not self._scratch or self._scratch[-1].numel() < slices + 1:
            if is_capturing(self._device):
                raise RuntimeError(
                    "gradacc_fused: the scratch memory would be made while a CUDA graph is captured. Run one window "
                    "on the capturing stream before the capture."
                )
            # The smaller ones are kept: a graph may still write to them.
            self._scratch.append(torch.zeros(slices + 1, dtype=torch.float64, device=self._device))
        memory = self._scratch[-1]
        return memory[:1].view(torch.int32), memory[1:]


@cache
def _tables_of(device: torch.device, stream: int) -> Tables:
    return Tables(device)


def current(device: torch.device) -> Tables:
    """Those of the device's current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _tables_of(device, stream)


class Words(tuple[int, ...]):
    """The words of a table that is asked for again and again: a tuple does not keep its hash, and this one is long."""

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = super().__hash__()
        return self._hash


@dataclass(frozen=True)
class Slices:
    """The slices of a list of tensors: words of [slices, 3] (start, tensor, numel), and the first one of each chunk."""

    words: Words
    first_of_chunk: Words

    @property
    def count(self) -> int:
        return len(self.words) // 3

    @property
    def chunks(self) -> int:
        return len(self.first_of_chunk) - 1


@lru_cache(maxsize=MOST_TABLES)
def slices_of(numels: tuple[int, ...]) -> Slices:
    """Cut tensors of these lengths."""
    words: list[int] = []
    first_of_chunk = []
    chunk_size, slice_size = CHUNK.value, SLICE.value
    for tensor, numel in enumerate(numels):
        for start in range(0, numel, slice_size):
            if start % chunk_size == 0:
                first_of_chunk.append(len(words) // 3)
            words += (start, tensor, min(slice_size, numel - start))
    first_of_chunk.append(len(words) // 3)
    return Slices(Words(words), Words(first_of_chunk))


_TAGS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


def tagged(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element with its dtype in the two highest bits; 0 where it has none."""
    if tensor.numel() == 0:
        return 0
    word = tensor.data_ptr() | _TAGS[tensor.dtype] << 62
    return word - (1 << 64) if word >> 63 else word  # as int64


def bits_of(values: Sequence[float]) -> tuple[int, ...]:
    """float64 values as int64 words."""
    return tuple(memoryview(array.array("d", values)).cast("B").cast("q"))
