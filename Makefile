# `make demo` and `make test` set everything up themselves, in .venv.
#   PYTHON=python3.12   the interpreter to build the environment from
#   VENV=none           install nothing, use PYTHON's environment as it is
#   WORKERS=4           how many tests run side by side (with pytest-xdist)
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

ifeq ($(VENV),none)
PY := $(PYTHON)
READY := current-env
READY_BENCH := current-env
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed-dev
READY_BENCH := $(VENV)/.installed-bench
endif

# One thread per worker, and no pool of compile processes for each: on as many workers as cores, more would only
# wait for each other. Workers begin with whole files, whose fixtures are made once, and then take over from
# each other.
PYTEST = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest -q $$($(PY) -c 'import xdist' 2>/dev/null && echo "-n $(WORKERS) --dist worksteal")
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test quick fuzz mutants lint dist bench clean distclean help current-env package-list

demo: $(READY) ## run the demonstration
	$(PY) -m piecewise_graph demo

test: $(READY) ## run the tests (GPU tests skip themselves without a GPU), show the slowest 25
	$(PYTEST) --durations=25

quick: $(READY) ## run some tests of every package, in at most 2 minutes
	$(PYTEST) -m "not slow" $$($(PY) tests/quick.py)

mutants: $(READY) ## put small bugs into a copy of the code, one at a time: the tests have to notice each
	OMP_NUM_THREADS=1 $(PY) tests/mutants.py

fuzz: $(READY) ## run 300 random programs and every op of torch on a CPU (tests/fuzz/README.md)
	$(PY) -m tests.fuzz programs --count 300 --jobs $(JOBS)
	$(PY) -m tests.fuzz ops --jobs $(JOBS)

lint: $(READY) package-list ## ruff, ruff format, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

dist: $(READY) ## build sdist and wheel into dist/, try the wheel in an empty environment
	$(PY) .ci/dist.py

bench: $(READY_BENCH) ## compare with eager, torch.compile and its graphs, Meta's, raw capture: one GPU, minutes
	$(PY) -m benchmarks.bench_compare

clean: ## remove build outputs and caches
	rm -rf build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find piecewise_graph custom_ops tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf .venv

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# One install line serves both machines: plain pip takes the torch build that the machine's index offers.
$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is needed: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@# Asking for pip also catches an environment left half-made.
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
		{ echo "no usable venv module (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PIP_INSTALL) -e '.[dev]'
	@# A CUDA build of torch has brought its own triton; without one, triton's interpreter runs our kernels.
	@$(PY) -c 'import triton' 2>/dev/null || [ "$$(uname -s)" != Linux ] || $(PIP_INSTALL) triton==3.6.0
	@$(PY) -c 'import torch; print("torch", torch.__version__, "CUDA" if torch.cuda.is_available() else "CPU")'
	@if nvidia-smi >/dev/null 2>&1 && ! $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo "warning: nvidia-smi works, this torch has no CUDA: GPU tests will be skipped" >&2; fi
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(PIP_INSTALL) -e '.[dev,bench]'
	@touch $@

# Looked up outside the checkout: an egg-info left here must not count as an installation.
current-env:
	@$(PYTHON) -c 'import sys; sys.path.pop(0); from importlib.metadata import version as v; v("torch"); v("piecewise-graph")' \
		2>/dev/null || { echo "VENV=none needs torch and this checkout installed. With torch there, run:" >&2; \
		echo "  $(PYTHON) -m pip install --no-deps --no-build-isolation -e ." >&2; exit 1; }

# A package that pyproject.toml does not list works from a checkout and is missing from the wheel.
package-list:
	@find piecewise_graph custom_ops -name __init__.py \
		| sed 's#/__init__.py$$##; s#^custom_ops#piecewise_graph/custom_ops#; s#/#.#g' \
		| while read -r name; do grep -q "^ *\"$$name\",*$$" pyproject.toml || { \
			echo "pyproject.toml: add \"$$name\" to tool.setuptools.packages" >&2; exit 1; }; done
