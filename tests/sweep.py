"""Runs a computation on every instruction set of this machine, on one thread and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def setting(read: Callable[[], int], write: Callable[[int], None], value: int) -> Iterator[None]:
    """A setting of the process, put back at the end."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def threads(count: int) -> AbstractContextManager[None]:
    return setting(torch.get_num_threads, torch.set_num_threads, count)


def streaming_from(bytes_: int) -> AbstractContextManager[None]:
    """Buffers of more bytes are written past the cache."""
    from gradacc_fused import _C

    return setting(_C.streaming_threshold, _C.set_streaming_threshold, bytes_)


def sweep(run: Callable[[], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """``run``'s tensors per instruction set and thread count; at least plain on one thread and on two."""
    from gradacc_fused import _C

    before, results = _C.isa(), []
    try:
        for isa in ("plain", "avx2", "avx512"):
            try:
                _C.use_isa(isa)
            except ValueError as error:
                assert "cannot run" in str(error)
                continue
            for count in (1, 2):
                with threads(count):
                    results.append(run())
    finally:
        _C.use_isa(before)
    assert len(results) >= 2
    return results


def assert_same_bits(results: list[list[torch.Tensor]]) -> None:
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
