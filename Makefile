# Two commands do everything on a fresh machine:  make demo   and   make test
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c constraints.txt
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-for-demo

.PHONY: demo test test-all test-others test-kernels lint format fuzz mutants docs dist try-wheel \
	results clean

# The pip that a new environment has may be one that takes a minute longer to choose versions. Bytecode
# is written at the end by all cores, where pip would write it with one; what is left out is compiled
# where it is imported. A file of torch that is for later versions of Python does not compile.
PACKAGES = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
LEFT_OUT := /site-packages/(transformers/models|.*/tests?)/
COMPILE = $(BIN)/python -m compileall -q -j 0 -x '$(LEFT_OUT)' "$(PACKAGES)" \
	> $(VENV)/compiled.txt 2>&1 || true
$(DEMO): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing polarstep into $(VENV) (the first time this takes a few minutes) …"
	@$(PIP) --compile --upgrade pip
	@$(PIP) torch
	@$(PIP) -e ".[experiments]"
	@$(COMPILE)
	@touch $(DEMO)

$(STAMP): $(DEMO)
	@echo "Installing what the tests need …"
	@$(PIP) -e ".[experiments,peers,ray,integrations,docs,dev]"
	@$(PIP) --no-deps timm torchtitan  # pyproject.toml says why
	@$(COMPILE)
	@touch $(STAMP)

demo: $(DEMO)
	@$(BIN)/polarstep demo

# All tests on two cores, by three processes with one thread each. The kernels need Triton's interpreter
# and so a process of their own, which has work whenever a worker of the others waits for something.
# Bytecode is written even where the environment says otherwise, as tests start many interpreters.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
test: export OMP_NUM_THREADS = 1
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 test-others test-kernels
test-all: ; @ALL_TESTS=1 $(MAKE) --no-print-directory test

# Two workers. All tests of a file run on one of them, so that no fixture of a file is made twice; the
# files come in the order of tests/conftest.py.
test-others: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder

test-kernels: $(STAMP)
	@TRITON_INTERPRET=1 $(PYTEST) tests/kernels tests/lab/kernels > $(VENV)/kernels.txt 2>&1; \
		status=$$?; cat $(VENV)/kernels.txt; exit $$status

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Random cases against what the package promises: make fuzz MINUTES=25 SEED=0  (docs/reliability.md)
MINUTES ?= 25
SEED ?= 0
fuzz: export OMP_NUM_THREADS = 1
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

# Part of the core wrong in one place at a time, and which mistakes no test notices (docs/reliability.md):
# make mutants FILES=src/polarstep/maps TESTS=tests/maps
FILES ?= src/polarstep/theory
TESTS ?= tests/theory
mutants: export OMP_NUM_THREADS = 1
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(FILES) --tests $(TESTS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site in site/, from the pages in docs/ and the docstrings; a broken link or reference is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The sdist and the wheel in dist/, checked as they would be for an upload.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# The wheel in dist/ in an empty environment, with torch and what torch needs.
try-wheel: dist
	bash .ci/try-wheel $(BIN)/python

# A report of each study with runs of polarstep in build/results/, then the numbers, tables and figures of the pages.
STUDIES := cifar10 gpt ideas long-run noise
results: $(STAMP)
	@for study in $(STUDIES); do \
		$(BIN)/polarstep report results/$$study --out build/results/$$study || exit 1; \
	done
	$(BIN)/python -m pages

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
