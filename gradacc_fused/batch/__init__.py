"""Logical batches: what splitting one must not change."""
