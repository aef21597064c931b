"""Builds what this machine can: see build_config.py for how that is decided."""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import build_config  # noqa: E402

extensions, command_classes = build_config.extensions(ROOT)
setup(ext_modules=extensions, cmdclass=command_classes)
