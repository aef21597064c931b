"""Backends: one contract (base.py), one table (registry.py), one module each."""
