"""Benchmarks: ``python -m bench`` from the repository root."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch loads: its profiler reports every start and stop otherwise
