# The two commands of the README are `make demo` and `make test`. Both install what they need into .venv first: the demo
# PyTorch, the core, the report and what reads tables, as it suggests `unskew init` with one; the tests the rest.
PYTHON ?= python3
BIN = .venv/bin

# Bytecode is kept whatever the shell says: else each process that a test starts would compile the package again.
export PYTHONDONTWRITEBYTECODE =

# Bytecode of the modules that are imported is made then; that of all of them would take a third of the installation.
INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile

TEST = $(BIN)/python -m pytest -n auto --dist loadgroup

.PHONY: help demo test test-unit test-lowest coverage test-all test-slow test-kernels test-methods test-cluster test-sites conformance newcomer fuzz check audit lock bench docs screenshots gallery format clean

.venv/demo-installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "unskew needs Python 3.11 or later; choose one with: make PYTHON=python3.12"'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) --constraint constraints.txt torch
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[hub,report]'
	touch $@

.venv/installed: .venv/demo-installed
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

# The lowest versions in pyproject.toml, which have builds for Python 3.11 to 3.13.
.venv-lowest/installed: pyproject.toml constraints-lowest.txt
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(INSTALL) --constraint constraints-lowest.txt --editable '.[dev]'
	touch $@

# Flower wants other versions: an environment of its own. All but PyTorch, which has a build for each kind of machine, is
# installed by hash. FLOWER=1.41.0 then replaces Flower by another supported version, with what it needs.
.venv-deploy/installed: pyproject.toml requirements-deploy.txt
	test -x .venv-deploy/bin/python || $(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/python $(INSTALL) --no-deps --require-hashes --requirement requirements-deploy.txt
	.venv-deploy/bin/python $(INSTALL) --constraint constraints-deploy.txt torch
	test -z "$(FLOWER)" || .venv-deploy/bin/python $(INSTALL) "flwr==$(FLOWER)"
	.venv-deploy/bin/python $(INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

TORCH = torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime \
  cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)

lock: .venv-deploy/installed  ## requirements-deploy.txt: the versions of constraints-deploy.txt, with hashes; constraints-lowest.txt
	.venv-deploy/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --constraint constraints-deploy.txt --extra flower --extra hub $(addprefix --no-emit-package ,$(TORCH)) \
	  --output-file requirements-deploy.txt pyproject.toml
	.venv-deploy/bin/uv pip compile --quiet --resolution lowest-direct --only-binary :all: --python-version 3.11 --extra dev \
	  --no-annotate --no-header --output-file constraints-lowest.txt pyproject.toml

.venv-audit/installed: constraints-audit.txt  ## environment of the audit tools
	test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python $(INSTALL) --requirement constraints-audit.txt
	touch $@

DOCSTRINGS = --select=DOC1,DOC3,DOC4 --style=google --arg-type-hints-in-docstring=False --check-return-types=False \
  --check-yield-types=False --skip-checking-short-docstrings=True --skip-checking-raises=True --skip-checking-private-functions=True

audit: .venv-audit/installed  ## spelling; sections of docstrings (pydoclint); bandit on the code; hadolint on the Dockerfiles; pip-audit on the pinned versions, if there is a network
	.venv-audit/bin/codespell unskew docs examples README.md CONTRIBUTING.md --ignore-words-list fo,nd,thirdparty --skip '*.json,*.html,*.js,*.css,*.svg,*.png,__pycache__'
	.venv-audit/bin/flake8 $(DOCSTRINGS) unskew
	.venv-audit/bin/bandit --quiet --recursive -ll unskew
	.venv-audit/bin/hadolint Dockerfile unskew/deployment/templates/Dockerfile
	.venv-audit/bin/python .ci/audit.py constraints.txt constraints-deploy.txt

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## */\1\t/p' $(MAKEFILE_LIST) | sort | while IFS="$$(printf '\t')" read -r target text; do \
	  printf '%-14s %s\n' "$$target" "$$text"; done

demo: .venv/demo-installed  ## compare four methods on skewed handwritten digits
	$(BIN)/unskew demo

test: .venv/installed  ## the quick test suite, in about eleven minutes on two cores
	$(TEST) -m "not slow" $(ARGS)

test-unit: .venv/installed  ## the tests of single modules that start no process and no run, in less than a minute on two cores
	$(TEST) -m "unit and not slow"

test-lowest: .venv-lowest/installed  ## the tests of `make test-unit`, with the lowest versions of dependencies, on Python 3.11 to 3.13
	.venv-lowest/bin/python -m pytest -n auto --dist loadgroup -m "unit and not slow"

coverage:  ## `make test`, and the share of lines and branches that it runs, which must not fall below that in pyproject.toml
	$(MAKE) test ARGS="--cov --cov-report=term:skip-covered"

test-all: .venv/installed  ## the whole test suite, before a release
	$(TEST)

test-slow: .venv/installed  ## the tests that `make test` leaves out: all combinations, random kills, runs of tables and examples
	$(TEST) -m slow $(WITHOUT)

test-kernels: .venv/installed  ## all methods on the engines with sums in another order, as on a CPU without vectors
	ATEN_CPU_CAPABILITY=default $(TEST) -m "not slow" tests/engines/test_registry.py tests/methods/fedcog/test_fedcog.py

test-methods: .venv/installed  ## of the slow tests, all methods and compositions on all engines, all data and models, the tutorials
	$(TEST) -m "slow and not fuzz" tests/methods tests/protocol tests/engines/test_registry.py tests/tasks/test_classification.py tests/conformance \
	  tests/simulation tests/models tests/generators tests/data tests/runs/test_assembly.py tests/records/test_recorder.py \
	  tests/runs/test_parallel.py tests/docs/test_methods_page.py tests/docs/test_tutorials.py

test-sites: .venv/installed .venv-deploy/installed  ## a deployed run with two SuperNodes over TLS, compared with the simulator
	$(BIN)/python -m pytest -m "not slow" tests/deployment/flower/test_superlinks.py tests/deployment/flower/test_project_files_units.py

check: .venv/installed audit  ## format, lint, types, audit, quick test suite
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TEST) -m "not slow"

format: .venv/installed  ## format the code and fix simple lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-cluster: .venv/installed  ## a run on two nodes of a Ray cluster on this machine, one of which is killed
	$(BIN)/python -m pytest -p no:xdist -o addopts= tests/engines/ray/ray_cases.py -k ray_node_dies

conformance: .venv/installed  ## unskew and other libraries against the papers' algorithms; PFLlib and FL-bench need a checkout
	$(BIN)/python -m conformance

fuzz: .venv/installed  ## random and hostile inputs: ten times as many as `make test`, and others in each run; prints how to repeat a failure
	$(TEST) -m "fuzz and not slow" --hypothesis-profile=fuzz $(ARGS)

newcomer:  ## the path of a newcomer in a fresh clone of what is committed, timed; ARGS=--without-tests leaves out `make test`
	$(PYTHON) -m speed.newcomer $(ARGS)

bench: .venv/installed  ## speed, memory, generation, Ray and the regret of auto, with one summary table; half an hour, idle machine
	$(BIN)/python -m speed

docs: .venv/installed  ## documentation in site/, after an update of the demo's output and pictures
	-$(BIN)/python -m speed.demo
	-$(BIN)/python docs/fetch_mermaid.py
	$(BIN)/mkdocs build --strict

screenshots: .venv/installed  ## the pictures of reports in docs/assets, from the demo and the example of the hospitals
	$(BIN)/python -m speed.screenshots

gallery: .venv/installed  ## the pictures of docs/gallery.md, by the code on that page
	$(BIN)/python -m speed.gallery

clean:  ## remove environments and build outputs
	rm -rf .venv .venv-deploy .venv-audit .venv-lowest site build *.egg-info .pytest_cache .mypy_cache .ruff_cache
