"""Runs the GPU kernels on the CPU. For tests only: it proves what kernels compute and never how fast they are."""
