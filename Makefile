# Every target makes what it needs; `make demo` and `make test` work on a fresh checkout.
PYTHON ?= python3
VENV := .venv
SHELL := bash
.SHELLFLAGS := -o pipefail -c
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
CORES ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

# With the folders that pytest leaves out by itself.
ALL_TESTS := -o 'norecursedirs=.* __pycache__' tests

.PHONY: install demo test test-faults test-real test-newcomer nightly servers release-check check size docs format bench clean

# uv installs in a tenth of pip's time; where it fails, pip does the same. Its list of packages is left
# out. Most of what is installed is never imported, and what is compiles itself, unless it must not.
UV_FLAGS := $(if $(PIP_INDEX_URL),--default-index $(PIP_INDEX_URL)) $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode)
PIP_FLAGS := $(if $(PYTHONDONTWRITEBYTECODE),--compile,--no-compile)
define install
@$(PYTHON) -m venv $(VENV)
@{ $(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5' && \
  $(BIN)/uv pip install --python $(BIN)/python $(UV_FLAGS) --editable '.[$(1)]' 2>&1 | grep -v '^ + '; } || \
  $(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[$(1)]'
endef

# mkdocs announces a successor of its theme each time, unless this is set.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

install: $(STAMP)

$(STAMP): pyproject.toml
	@echo "Installing the executor and all tools of development into $(VENV), once."
	$(call install,dev)
	@touch $@ $(DEMO_STAMP)

# The demo needs none of the tools of development.
$(DEMO_STAMP): pyproject.toml
	@echo "Installing Snakemake, MLflow, scikit-learn and the executor into $(VENV), once: 0.8 GB."
	$(call install,demo)
	@touch $@

demo: $(DEMO_STAMP)
	@$(BIN)/python workflows/digits/demo.py

# More workers than cores: much of a workflow at a site is waiting. Each takes half a gigabyte.
test: $(STAMP)
	$(BIN)/python -m pytest -m 'not software and not nightly' -n $$(( $(CORES) + 6 )) --dist worksteal $(PYTEST_ARGS)

# No job lost, doubled or misreported: each fault in each step, most of which is waiting, and random
# schedules in virtual time. SCHEDULES=100000 plays so many of these: 40 ms of CPU each, or half a second
# where uploads take minutes.
# REAL_SCHEDULES=200 walks so many with real processes: 4 s of CPU each.
SCHEDULES ?= 140
REAL_SCHEDULES ?= 8
test-faults: $(STAMP)
	MANTIK_SCHEDULES=$(SCHEDULES) MANTIK_REAL_SCHEDULES=$(REAL_SCHEDULES) $(BIN)/python -m pytest -n $$(( 4 * $(CORES) )) --dist worksteal -m 'not nightly' tests/faults $(PYTEST_ARGS)

# The real servers, and the tools that tests use beside them.
servers: $(STAMP)
	PYTHON="$(abspath $(BIN))/python" tests/real/install

# Much of it is waiting for the servers.
test-real: servers
	$(BIN)/python -m pytest -m 'software and not nightly' -n $$(( 3 * $(CORES) )) --dist loadgroup $(PYTEST_ARGS)

# What a newcomer types is one after the other, and much of it is installing.
test-newcomer: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/newcomer $(PYTEST_ARGS)

# What varies that which CI tries: the same faults in more steps, the same workflows at more sites.
nightly: servers
	$(BIN)/python -m tests.mutations
	$(BIN)/python -m pytest -m nightly -n $$(( 4 * $(CORES) )) --dist loadgroup $(ALL_TESTS) $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck snakemake_executor_plugin_mantik/jobs/bash/*.sh tests/jobs/golden/*.sh
	$(BIN)/python -m tests.size --check
	@# One process compiles all tests and what they import; the workers of `make test` need not, then.
	$(BIN)/python -m pytest -q --collect-only $(ALL_TESTS) | grep -v ::
	$(MKDOCS) build --strict --config-file website/mkdocs.yml

# Lines, statements and modules of each room. `make check` fails if one exceeds what tests/size.json has.
size:
	@$(PYTHON) -m tests.size

# Writes the pages that are made from the code, then serves the documentation and shows each change at once.
docs: $(STAMP)
	$(BIN)/python -m website.reference
	$(MKDOCS) serve --config-file website/mkdocs.yml

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# The wheel and the sdist in clean environments of each Python there is; minutes each.
release-check: $(STAMP)
	$(BIN)/python tests/release/check.py

clean:
	rm -rf $(VENV) build dist .cache
