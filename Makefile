# Every target sets up what it needs in .venv, with pip, from a bare Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-deep lint bench format clean

demo: $(STAMP)  ## The tour of what kvatlas does
	$(BIN)/python examples/tour.py

test: $(STAMP)  ## Unit, property and documentation tests
	$(BIN)/python -m pytest -n auto

test-deep: $(STAMP)  ## The same properties with many more examples
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n auto

lint: $(STAMP)  ## Formatting, lints and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)  ## Figures, each beside a limit measured in the same run
	$(BIN)/python -m benchmarks

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: its exact pin selects the CPU build where one is
# offered, and nothing installed later may then pull another.
$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
