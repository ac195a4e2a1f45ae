PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
# Those that need no data and no other libraries.
MEASUREMENTS := step_time sizes
PIP := $(PY) -m pip --disable-pip-version-check --quiet --quiet

# Python compiles a module when it is first imported; pip would compile all that is installed, which takes a minute.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: help demo test check bench gpu ptx ptx-folder clean

help:
	@echo "make demo    fine-tune a small BERT with MoQ on the sample in examples/demo; needs no network after the install"
	@echo "make test    the checks and all tests"
	@echo "make check   ruff, mypy"
	@echo "make bench   the measurements that need no data"
	@echo "make gpu     tests and measurements on one GPU in 8 minutes, with the libraries of PYTHON=...; needs no network"
	@echo "make ptx     the kernel's tests on compiled PTX, with the PTX interpreter in the folder PTX=...; needs no GPU"
	@echo "make clean   remove the virtual environment, caches and runs"

demo: $(INSTALLED)
	@rm -rf runs/demo
	@HF_HUB_OFFLINE=1 $(PY) scripts/run_glue_moq.py examples/demo/demo.json

# Three processes on two cores: some tests wait for processes of their own.
test: check
	@echo "== pytest"
	@HF_HUB_OFFLINE=1 $(PY) -m pytest --quiet --numprocesses 3 --dist worksteal

check: $(INSTALLED)
	@echo "== ruff"
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet .
	@echo "== mypy"
	@$(PY) -m mypy

bench: $(INSTALLED)
	@for name in $(MEASUREMENTS); do echo "== $$name" && HF_HUB_OFFLINE=1 $(PY) benchmarks/$$name.py || exit 1; done

# Of the machine's own Python, which need not be able to install anything.
gpu:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) benchmarks/gpu.py $(GPU)

# A plugin of pytest in the folder hands what Triton compiles to an interpreter of PTX.
ptx: ptx-folder $(INSTALLED)
	@mkdir -p runs/ptx
	@HF_HUB_OFFLINE=1 PYTHONPATH="$(CURDIR):$(abspath $(PTX))" $(PY) -m pytest --quiet -W default -p emu_plugin -p no:cacheprovider -p no:xdist tests/test_triton_quant.py

ptx-folder:
	@test -f "$(PTX)/emu_plugin.py" || { echo "make ptx needs an interpreter of PTX, in a folder with its emu_plugin.py: make ptx PTX=<folder>"; exit 1; }

clean:
	rm -rf $(VENV) runs build dist moq_hf.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): constraints.txt setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moq_hf needs Python 3.11 or newer: make PYTHON=<path>")'
	@echo "Installing into $(VENV), once: this takes a few minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile --constraint constraints.txt setuptools torch
	@$(PIP) install --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@
