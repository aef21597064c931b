"""Benchmarks: ``python -m bench`` from the repository root."""

import os

# Before torch loads: else its profiler reports every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
