# Every target only wraps commands that README.md and CONTRIBUTING.md document.
#   make serve    build, fetch the default model once, serve it on 127.0.0.1:8000
#   make test     the default test run           make test-slow   the rest of it
#   make check    format, lint, types, imports   make bench       loads against a server of its own
#   make bench-compare    what moved since the baseline of make bench-baseline
#   make test-ray    workers on a real Ray        make test-deploy    what is in deploy/; both install their extra
#   make test-engines     the gateway over llama-cpp-python's server, which it installs for itself
#   make test-vllm        the gateway over vLLM and its KV events, which it installs for itself (3 GB)
#   make test-nixl        KV by NIXL, which it installs (70 MB)
#   make test-compiled    the tests of the machines, on a wheel, in which they are compiled
#   make bench-engines    loads against headrace and other engines (ENGINES), in turns; it installs them
#   make bench-link       KV over a network of known rate: two namespaces (root)
#   make setup    the development environment    make clean       forget what was built

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST  := $(BIN)/python -m pytest
NATIVE  := pyproject.toml CMakeLists.txt $(shell find src -path '*/csrc/*' -type f)

# Two ways to be installed, both from this checkout, so that only a change of the native part or of the metadata needs
# another build: `app` has all that serving needs, `dev` every tool. `make serve` takes what is there.
APP := $(VENV)/.installed-app
DEV := $(VENV)/.installed-dev

# Other people's engines live in environments of their own, build/engines/NAME.
ENGINES   ?= llama-cpp openvino vllm
LLAMA_CPP := build/engines/llama-cpp

# A wheel of this checkout, with the libraries of the development environment beside it.
WHEEL := build/compiled

.PHONY: serve setup test test-slow test-engines test-vllm test-ray test-nixl test-deploy test-compiled bench-engines bench-link check format bench bench-baseline bench-compare clean
.DEFAULT_GOAL := serve

serve: $(if $(wildcard $(DEV)),$(DEV),$(APP))
	$(BIN)/headrace serve $(ARGS)

setup: $(DEV)

# A file's tests stay together: they share servers and models.
test: $(DEV)
	$(PYTEST) -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-slow: $(DEV)
	$(PYTEST) -m slow $(ARGS)

test-ray: $(DEV)
	$(PIP) install 'ray>=2.60,<3'
	$(PYTEST) -m slow tests/chaos/test_ray.py tests/chaos/test_ray_more.py $(ARGS)

test-nixl: $(DEV)
	$(PIP) install --no-deps 'nixl-cu12>=1.5,<2'
	UCX_TLS=tcp,self $(PYTEST) tests/conformance/test_mover.py $(ARGS)

test-deploy: $(DEV)
	$(PIP) install 'helm-python-sdk>=0.2.2' 'kubernetes-validate>=1.37' 'pyyaml>=6'
	$(PYTEST) -m slow tests/deploy $(ARGS)

test-compiled: $(DEV)
	@$(BIN)/python -m venv --clear --without-pip $(WHEEL)
	@echo $(CURDIR)/$(VENV)/lib/python3*/site-packages > $$(echo $(WHEEL)/lib/python3*/site-packages)/development.pth
	$(PIP) --python $(WHEEL)/bin/python install --no-deps --no-build-isolation .
	$(WHEEL)/bin/python -c 'from headrace.core.scheduler import scheduler; assert scheduler.__file__.endswith(".so"), scheduler'
	$(WHEEL)/bin/python -m pytest tests/unit/core tests/property tests/replay $(ARGS)

test-engines: $(DEV)
	PYTHONPATH=tests $(BIN)/python -m support.peers.environments llama-cpp
	LLAMA_CPP_PYTHON=$(LLAMA_CPP)/bin/python $(PYTEST) -m slow tests/engines/test_llama_cpp.py $(ARGS)

test-vllm: $(DEV)
	PYTHONPATH=tests $(BIN)/python -m support.peers.environments vllm
	$(PYTEST) -m slow tests/engines/test_vllm.py $(ARGS)

bench-engines: $(DEV)
	PYTHONPATH=tests $(BIN)/python -m support.side_by_side "$(ENGINES)" $(ARGS)

bench-link: $(DEV)
	PYTHONPATH=tests $(BIN)/python -m support.link_transfer $(ARGS)

check: $(DEV)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md SECURITY.md STYLE.md
	$(PYTEST) -q tests/tidy

format: $(DEV)
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

bench: $(DEV)
	$(BIN)/headrace bench all --out build/bench.json $(ARGS)

bench-baseline: $(DEV)
	$(BIN)/headrace bench baseline tests/bench/baseline.json $(ARGS)

bench-compare: $(DEV)
	$(BIN)/headrace bench compare tests/bench/baseline.json $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "creating a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "headrace needs Python 3.11 or newer; name one with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# Both ways build with the same tools, which stay in the environment: others would lie elsewhere, and everything would be
# compiled once more. A line every ten seconds, since pip says nothing until all is done.
define install
	@echo "installing the build tools"
	$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.4' cmake ninja
	@echo "installing headrace$(2); compiling all of its native part takes some two minutes on two cores"
	@mkdir -p build; touch build/.begun; \
	(while sleep 10; do \
	  num=$$(find build -name '*.o' -newer build/.begun | wc -l); \
	  of=$$(cat build/*/build.ninja 2>/dev/null | grep -c '\.o: CXX'); \
	  echo "  $$((seconds += 10)) s: $$num of at most $$of files are compiled"; \
	done) & ticker=$$!; \
	trap 'kill $$ticker' EXIT; \
	$(PIP) install --no-build-isolation -e '$(1)'
endef

$(APP): $(BIN)/python $(NATIVE)
	$(call install,.)
	@touch $@

$(DEV): $(BIN)/python $(NATIVE)
	$(call install,.[dev], with every tool of the tests)
	@touch $(APP) $@
