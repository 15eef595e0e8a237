# `make demo` and `make test` install everything they need into .venv and change nothing else.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types layers pytest coverage soak docs tutorial bench-demo bench-recipes bench-train format clean help

help:
	@echo "make demo        train a ViT on real digits, then show what it looks at"
	@echo "make test        check lint, types, import layers and tests"
	@echo "make coverage    run the tests of make test and measure which code they run"
	@echo "make soak        run the long tests"
	@echo "make docs        run the tutorial's chapters and build the site in build/docs"
	@echo "make tutorial    repeat the long measurements of the tutorial (hours), then make docs"
	@echo "make bench-demo  measure the demo and import times"
	@echo "make bench-recipes  measure digits and fashion-mnist with three seeds (half an hour)"
	@echo "make bench-train measure the overhead of training"
	@echo "make format      format the code"
	@echo "make clean       remove .venv and caches, keep runs/"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vitkit needs Python 3.11 or newer; pass, for example, PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 2; }

.venv/.use: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

# The last vit-pytorch with a plain ViT, for the tests only, separate from the newest one.
.venv/apart/vit-pytorch-0.40.2: | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $@ vit-pytorch==0.40.2 || { rm -rf $@; exit 2; }

# Without bytecode, which pip compiles of all 24,000 files in one process: each is compiled when it is imported.
.venv/.develop: .venv/bin/python pyproject.toml constraints.txt | .venv/apart/vit-pytorch-0.40.2
	$(PIP) --no-compile -e '.[dev,docs,parity]'
	@touch $@ .venv/.use .venv/.docs

.venv/.docs: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@ .venv/.use

# OpenMP's threads sleep early, as in the command `vitkit`; otherwise the demo needs 25 minutes or more beside
# another busy program.
demo: .venv/.use
	GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-1000} $(BIN)/python examples/digits.py

# The three checks of the code run side by side, as the two workers of pytest do.
test: .venv/.develop
	@$(MAKE) --no-print-directory --jobs=2 lint types layers
	$(PYTEST)

lint: .venv/.develop
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.develop
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

layers: .venv/.develop
	$(BIN)/lint-imports

# Bytecode is kept, whatever the shell has set: pytest's rewritten tests take longest to compile.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

pytest: .venv/.develop
	$(PYTEST)

# Separate from `test`: counting lines takes a fifth more time.
coverage: .venv/.develop
	$(PYTEST) --cov --cov-report=term:skip-covered

soak: .venv/.develop
	$(BIN)/python -m pytest -m soak --timeout 900

# Builds all pages again, so that no warning is missed; results of cells are cached in build/cells.
# More processes than cores: a process takes several pages in a row, and some chapters take long.
docs: .venv/.docs
	rm -rf build/docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -E -W --keep-going -q -j 16 -d build/doctrees -b html docs build/docs
	$(BIN)/python scripts/check_site.py build/docs

# Datasets are read from DATA_ROOT, or downloaded if it is not given.
tutorial: .venv/.develop
	names=$$(cd docs/tutorial && ../../$(BIN)/python -c 'import measure; print(*measure.experiments())') && \
		$(BIN)/python docs/tutorial/measure.py $$names $(if $(DATA_ROOT),--data-root $(DATA_ROOT))
	$(BIN)/python benchmarks/distil.py --output docs/tutorial/results/distillation.json
	$(BIN)/python benchmarks/transfer.py $(if $(DATA_ROOT),--data-root $(DATA_ROOT)) --test \
		--output docs/tutorial/results/transfer.json
	$(MAKE) docs

bench-demo: .venv/.develop
	$(BIN)/python benchmarks/demo.py

bench-recipes: .venv/.develop
	$(BIN)/python benchmarks/recipes.py digits fashion-mnist

bench-train: .venv/.develop
	$(BIN)/python benchmarks/train.py

format: .venv/.develop
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage
