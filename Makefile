# Every target sets up what it needs in .venv, with pip, from a bare Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo tour test test-deep test-gpu lint bench bench-gpu format clean

demo: $(STAMP)  ## The main job: plan, prefill, ship the cache, decode elsewhere
	$(BIN)/python -m examples.handover

tour: $(STAMP)  ## What else there is: geometry, plans, a model on its cache
	$(BIN)/python -m examples.tour
	$(BIN)/python -m examples.generate

test: $(STAMP)  ## Unit, property and documentation tests; Triton interprets
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto

test-deep: $(STAMP)  ## The same properties with many more examples
	TRITON_INTERPRET=1 HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n auto

test-gpu: $(STAMP)  ## The kernels on a CUDA device; nothing is run where there is none
	$(BIN)/python -m pytest -n auto tests/gpu

lint: $(STAMP)  ## Formatting, lints and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)  ## Figures, each beside a limit measured in the same run
	$(BIN)/python -m benchmarks

bench-gpu: $(STAMP)  ## The kernels on a CUDA device, beside its own limits
	$(BIN)/python -m benchmarks.gpu

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The transports are whole without what their wheels ask for (gigabytes of CUDA). Mooncake
# wants libibverbs even over TCP; NIXL's wheel brings one, and a second copy from the system
# would crash NIXL at exit. Where a transport cannot be had, its tests are skipped, saying so.
define WIRES
-$(BIN)/pip install --quiet --no-deps 'nixl==1.5.1' 'nixl-cu12==1.5.1'
-$(BIN)/pip install --quiet --no-deps 'mooncake-transfer-engine-non-cuda==0.3.13.post1'
-cd $(VENV)/lib/python3*/site-packages/mooncake_transfer_engine_non_cuda.libs && \
	ln -sf ../nixl_cu12.libs/libibverbs-*.so.* ../nixl_cu12.libs/libnl-*.so.* . && \
	ln -sf $$(ls libibverbs-*.so.* | head -1) libibverbs.so.1
endef

# torch comes first and alone: its exact pin selects the CPU build where one is
# offered, and nothing installed later may then pull another.
$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(WIRES)
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
