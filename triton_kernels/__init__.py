"""Triton kernels of gradacc_fused, installed as ``gradacc_fused.triton_kernels``.

The top-level name belongs to a package that Triton ships, so this folder is mapped under ours by pyproject.toml.
It holds one module per stage (accumulate, clip, update) once the backend is there; ``gradacc_fused.backends()`` says
whether it is.
"""
