# From a fresh clone, `make quickstart` and `make test` do everything; `make help` lists the rest.
#
#   make quickstart ARGS="seed=1"          changes to the recipe
#   make test ARGS="tests/recipe -x"       arguments for pytest
#   make test SHARE=$(git rev-parse HEAD)  as CI does: also the slow tests that this commit chooses (as root; 20 minutes)
#   make PYTHON=python3.12 quickstart      another Python

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv takes a quarter of pip's time. It does not know pip's settings, so pip does it where uv cannot.
define locked
	@$(PIP) --require-hashes -r locks/uv.txt
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r $(1) $(2) || \
	  $(PIP) --no-deps --require-hashes -r $(1)
endef
SOURCES := corral tests docs examples recipes $(wildcard benchmarks)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadgroup
# Two processes, one of which has clusters (tests/conftest.py): with a third, Ray misses deadlines. Upper bounds on time are
# five times as long (tests/deadlines.py).
VERDICT := CORRAL_TEST_PATIENCE=5 $(PYTEST) -n 2 --verdict

GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_TESTS := $(addprefix tests/training/test_, sharded_training.py sharded_checkpoint.py copies.py loading_by_shard.py \
  fused_training.py ranks_on_gpu.py link_traffic.py)

# Hundreds of processes import Corral. With this variable, which some machines set, each would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart seeds test test-all lint install reference lock clean
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: .venv/.installed  ## install, then train a real model on this machine's CPU (5 minutes on 2 cores)
	$(BIN)/corral train recipes/quickstart.yaml checkpoint.resume=never $(ARGS)

seeds: .venv/.installed  ## the quickstart with three seeds, and a table of what each reached (15 minutes)
	$(BIN)/python recipes/three_seeds.py $(ARGS)

test: .venv/.installed-dev  ## install, then run the tests that need no root and no patience (5 minutes on 2 cores)
	@# Three processes on two cores: many of these tests wait for other processes.
	$(if $(SHARE),$(VERDICT) --share $(SHARE),$(PYTEST) -n 3 -m "not slow and not lab") $(ARGS)

test-all: .venv/.installed-dev  ## all tests: long runs, clusters of namespaces, Slurm, containers (needs root; an hour)
	$(VERDICT) $(ARGS)

.PHONY: test-gpu
test-gpu:  ## trainers and transfers on up to 8 NCCL ranks that share one GPU, and a table (half an hour); installs nothing
	@# Needs torch with CUDA, Corral's dependencies, pytest, pytest-xdist and hypothesis: in .venv, else in $(PYTHON).
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "error: make test-gpu needs a GPU, and the torch of $(GPU_PYTHON) sees none" >&2; exit 1; }
	CORRAL_TEST_DEVICE=cuda:0 OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -p no:cacheprovider -m gpu $(GPU_TESTS) $(ARGS)

.PHONY: mutate
mutate: .venv/.installed-dev  ## break the code in known places, and see which fast test notices (ROOM=data: corral/data)
	$(BIN)/python tests/mutate.py $(ROOM)

lint: .venv/.installed-dev  ## ruff (rules and format) and mypy
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

install: .venv/.installed-dev

reference: .venv/.installed
	$(BIN)/python docs/generate_recipe_reference.py

lock: .venv/.made  ## choose the versions in locks/ anew: the newest that pyproject.toml allows
	$(PIP) --require-hashes -r locks/uv.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" sh locks/update.sh

clean:  ## delete the virtual environment and caches; runs stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# What is installed is installed again when the files that say what to install have changed.

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Corral needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments, because its modules venv and ensurepip are missing." \
	       "On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.installed: .venv/.made pyproject.toml constraints.txt locks/uv.txt locks/quickstart.txt
	@echo "installing Corral and what it stands on into .venv (a few minutes the first time)"
	$(PIP) -c constraints.txt torch --no-compile
	$(call locked,locks/quickstart.txt,--compile-bytecode)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv/.installed-dev: .venv/.installed locks/dev.txt
	@echo "installing what tests and linters need into .venv"
	$(PIP) -c constraints.txt 'triton; sys_platform == "linux"'
	@# Compiled is only what tests import.
	$(call locked,locks/dev.txt)
	$(BIN)/python tests/command_preload.py
	@touch $@
