# `make demo` and `make test` set up everything they need in .venv; nothing else is touched.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types layers pytest soak docs tutorial bench-demo bench-recipes bench-train format clean help

help:
	@echo "make demo        train a ViT on real digits, then show what it looks at"
	@echo "make test        lint, types, import layers and tests"
	@echo "make soak        the long tests"
	@echo "make docs        run the tutorial's chapters and build the site, build/docs"
	@echo "make tutorial    measure again what the tutorial shows of long trainings (hours), then make docs"
	@echo "make bench-demo  the demo's figures, and import times"
	@echo "make bench-recipes  digits and fashion-mnist over three seeds, reference results (half an hour)"
	@echo "make bench-train what training costs besides the arithmetic"
	@echo "make format      format the code"
	@echo "make clean       remove .venv and caches; runs/ stays"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vitkit needs Python 3.11 or newer; pass PYTHON=python3.12, say"; exit 2; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 2; }

.venv/.use: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	@touch $@

# The last vit-pytorch whose ViT is plain, for the tests alone: apart from the newest one.
.venv/apart/vit-pytorch-0.40.2: | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $@ vit-pytorch==0.40.2 || { rm -rf $@; exit 2; }

.venv/.develop: .venv/bin/python pyproject.toml constraints.txt | .venv/apart/vit-pytorch-0.40.2
	$(PIP) -e '.[dev,docs,parity]'
	@touch $@ .venv/.use .venv/.docs

.venv/.docs: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@ .venv/.use

demo: .venv/.use
	$(BIN)/python examples/digits.py

test: lint types layers pytest

lint: .venv/.develop
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.develop
	$(BIN)/mypy

layers: .venv/.develop
	$(BIN)/lint-imports

pytest: .venv/.develop
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		--cov --cov-report=term:skip-covered

soak: .venv/.develop
	$(BIN)/python -m pytest -m soak

# All pages are read afresh, so that no warning is missed; cells that ran are kept in build/cells.
docs: .venv/.docs
	rm -rf build/docs
	$(BIN)/sphinx-build -E -W --keep-going -q -d build/doctrees -b html docs build/docs
	$(BIN)/python scripts/check_site.py build/docs

# MNIST and the like are looked for in DATA_ROOT, and fetched where it is not given.
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
