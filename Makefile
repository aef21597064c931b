# Each target sets itself up: `make test` on a fresh clone makes .venv, installs torch, builds in place and runs.
#   VENV    the virtual environment          (make test VENV=.venv-213)
#   TORCH   what pip installs as torch       (make test VENV=.venv-213 TORCH=torch==2.13.0)
#   PYTHON  the interpreter that makes VENV
#   BENCH   options of the benchmark         (make bench BENCH='--quick --json rows.json')
# The extension is built in place for one torch at a time: use one checkout per torch version.
VENV ?= .venv
TORCH ?= torch
PYTHON ?= python3
WINDOWS ?= 60
BENCH ?=
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install -q
SOURCES = setup.py build_config.py pyproject.toml $(wildcard csrc/*.* csrc/*/*.*)
CXX_FILES = $(wildcard csrc/*.* csrc/*/*.* tests/harness/cuda/*.* tests/harness/cuda/include/*.h tests/harness/cuda/include/*/*/*.h)

.PHONY: install demo test bench lint format clean

install: $(VENV)/.installed

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) setuptools wheel ninja
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@

demo: install
	$(VENV)/bin/gradacc-fused demo --windows $(WINDOWS) --output demo_output

test: install
	$(VENV)/bin/python -m pytest

bench: install
	$(VENV)/bin/python -m bench $(BENCH)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info gradacc_fused/_C*.so
