# make setup | quickstart | test | lint.  Everything happens inside .venv.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
ARGS   ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: setup quickstart test lint clean

setup: $(STAMP)

# torch's CPU build is not on PyPI: the second try asks PyTorch's own index for it.
$(STAMP): requirements/cpu.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; assert sys.version_info[:2] == (3, 11), "requirements/cpu.txt is for Python 3.11; set PYTHON="'
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt \
	  || $(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt \
	       --extra-index-url https://download.pytorch.org/whl/cpu
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Trains SmolLM2-135M by GRPO on this machine's CPU; see README.md for what to expect.
quickstart: setup
	$(BIN)/grpo-mlm train yaml_configs/quickstart.yaml $(ARGS)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
