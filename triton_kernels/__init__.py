"""Triton kernels of gradacc_fused, installed as ``gradacc_fused.triton_kernels``: one module per stage.

The top-level name belongs to a package that Triton ships, so this folder is mapped under ours by pyproject.toml.
Importing a stage needs Triton; importing this package does not.
"""
