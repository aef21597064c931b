"""STREAM triad ``a = b + s * c``: 12 bytes per element, compiled here and timed beside what it is compared to."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

BYTES = 12  # per element; the line that a plain store reads first is not counted, as in STREAM
ELEMENTS = 64 * 1024 * 1024  # 256 MB an array: far larger than the last cache
SCALE = 3.0
SOURCE = Path(__file__).with_name("triad.cpp")


class TriadUnavailableError(RuntimeError):
    """There is no compiler, or it failed; the message says which."""


@cache
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None or shutil.which(compiler) is None:
        raise TriadUnavailableError(f"the triad needs a C++ compiler: {compiler or 'none'} is on PATH")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "triad.so"
        command = [compiler, "-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-o", str(target), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise TriadUnavailableError(f"{compiler} could not compile the triad: {done.stderr.strip()[:300]}")
        library = ctypes.CDLL(str(target))
    library.triad.restype = ctypes.c_double
    library.triad.argtypes = [
        *[ctypes.c_void_p] * 3, ctypes.c_float, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return library


def unavailable_reason() -> str | None:
    """Why there is no triad here; None where there is one."""
    try:
        _library()
    except TriadUnavailableError as error:
        return str(error)
    return None


class Triad:
    """Three arrays, and the two loops over them by as many threads as torch has.

    Args:
        elements: Of one array, rounded down to a multiple of 16.

    Raises:
        TriadUnavailableError: Nothing here can compile it.
    """

    def __init__(self, elements: int = ELEMENTS) -> None:
        self._library = _library()
        elements -= elements % 16
        self.a = torch.zeros(elements)
        self.b, self.c = torch.full_like(self.a, 1.0), torch.full_like(self.a, 2.0)
        self.loops = {"plain": 0, "stream": 1} if self._library.triad_streams() else {"plain": 0}

    @property
    def moved(self) -> int:
        """Bytes of one triad."""
        return BYTES * self.a.numel()

    def __call__(self) -> dict[str, float]:
        """Seconds of each loop, once."""
        pointers = [tensor.data_ptr() for tensor in (self.a, self.b, self.c)]
        found = {}
        for name, stream in self.loops.items():
            found[name] = self._library.triad(*pointers, SCALE, self.a.numel(), torch.get_num_threads(), stream)
            if found[name] < 0:
                raise RuntimeError(f"triad: the {name} loop refused its arguments")
        return found


@cache
def shared() -> Triad:
    """One triad for all groups: its arrays take a while to be mapped."""
    return Triad()
