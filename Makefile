# Every target builds what it needs in .venv. Variables:
#   PYTHON=python3.12        interpreter that .venv is made of (a CUDA, ROCm or Ascend PyTorch in it is kept and used)
#   NO_VENV=1                run with $(PYTHON) as it is and install nothing
#   BACKEND=cuda             run the suite natively on that backend's device (cpu, the default: all that a CPU can run)
#   RESULTS=folder           leave what ran where, with its counts, as JSON and JUnit files
#   TORCH, TORCH_INDEX       PyTorch for a machine whose $(PYTHON) has none (CPU build, or CUDA with an NVIDIA device)
#   CONSTRAINT=file          versions of everything else (ci/constraints/pinned.txt; empty for the newest)
#   WORKERS=2                test processes
#   WHOLE=1                  every test and sample on a CPU, in place of the shares of tests/thinned.yaml
#   PART=1/4                 the first of four parts of test or test-full, which together are all of it
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
CONSTRAINT ?= ci/constraints/pinned.txt
BACKEND ?=
WORKERS ?= 2
PART ?=
WHOLE ?=
RESULTS ?=
ARGS ?=

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-full seconds doctor container check lint static static-full static-tables baseline bench docs pictures site
.PHONY: tune format clean env pins test-portable test-trainers test-liger test-npu test-npu-some

LINKS := liger_multi/backends liger_multi/reference
ifdef NO_VENV
RUN := $(PYTHON)
ENV := $(LINKS)
else
RUN := $(VENV)/bin/python
ENV := $(VENV)/.stamp $(LINKS)
endif

# One thread a process: the processes already fill the cores, and tiny tensors gain nothing from more. Compiled files are kept, whatever
# the caller says: without them every process rewrites the assertions of all tests again, which takes ten seconds.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(TEST_ENV) $(RUN) -m pytest -q $(PART:%=--part %)
# What `make test` leaves to `make test-full`: slow tests, and on a CPU without WHOLE=1 what is outside of its shares.
NOT_SLOW = -m "not slow$(if $(WHOLE)$(DEVICE),, and not sampled)"
# $(call keep,part): where a part of the suite leaves its results
keep = $(if $(RESULTS),--results=$(RESULTS)/$(1).json --junitxml=$(RESULTS)/$(1).xml)
# $(call skipped,part,reason): a part that this machine cannot run, with its reason, on the screen and among the results
skipped = echo "== $(1): not run: "$(2); $(if $(RESULTS),$(RUN) -m ci.results --not-run $(2) $(RESULTS)/$(1).json;)
PROCESSES := $(if $(filter-out 0 1,$(WORKERS)),-n $(WORKERS))
DEVICE := $(filter-out cpu,$(BACKEND))
# Kernel tests that need Triton's interpreter, tests that must not see it, and the ones `make check` runs.
INTERPRETED = $(wildcard tests/ops/test_ops.py tests/ops/test_isolation.py tests/*/test_triton*.py)
COMPILED = $(wildcard tests/kernels/test_static.py)
FAST = $(wildcard tests/tools/test_harness.py tests/tools/test_layering.py tests/dispatch/test_import.py tests/dispatch/test_dispatch.py)

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@sed -n '/^# /s/^# //p;/^PYTHON/q' $(MAKEFILE_LIST)

env: $(ENV)  ## the environment alone

$(VENV)/.stamp: pyproject.toml setup.py ci/venv.py ci/constraints/pinned.txt liger_multi/_version.py
	$(PYTHON) -m ci.venv $(VENV) --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)" --constraint "$(CONSTRAINT)" --extras test
	@touch $@

pins:  ## the newest versions into ci/constraints/pinned.txt
	$(PYTHON) -m ci.venv $(VENV)-newest --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)" --constraint "" --extras test,docs
	$(VENV)-newest/bin/python -m ci.venv --write-pins

$(LINKS):
	@test -e $@ || ln -s ../$(notdir $@) $@

# The demo needs less than the tests do, which add the rest to the same environment: a minute in place of several.
ifndef NO_VENV
DEMO_ENV := $(if $(wildcard $(VENV)/.stamp),$(VENV)/.stamp,$(VENV)/.demo) $(LINKS)
endif

$(VENV)/.demo: pyproject.toml setup.py ci/venv.py ci/constraints/pinned.txt liger_multi/_version.py
	$(PYTHON) -m ci.venv $(VENV) --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)" --constraint "$(CONSTRAINT)" \
	  --extras transformers,cli --no-triton
	@touch $@

demo: $(or $(DEMO_ENV),$(ENV))  ## train two small models, unpatched and patched, and compare them
	HF_HUB_OFFLINE=1 $(RUN) -m liger_multi demo --overwrite $(ARGS)

ifeq ($(DEVICE),)
test: $(ENV)  ## the suite: references natively, kernels interpreted and cross-compiled (BACKEND=cuda: on a device)
	@failed=0; \
	echo "== native"; \
	$(PYTEST) $(NOT_SLOW) $(PROCESSES) $(COMPILED:%=--ignore=%) $(call keep,native) $(ARGS) || failed=1; \
	$(SUITE_TRITON) \
	$(MAKE) --no-print-directory test-npu-some ARGS= || failed=1; \
	exit $$failed
else
test: $(ENV)
	$(PYTEST) $(NOT_SLOW) --backend $(DEVICE) $(PROCESSES) $(call keep,$(DEVICE)) $(ARGS)
endif

test-portable: $(ENV)  ## the native suite under other instruction sets, numbers of threads and orders (hours; ROWS=1,4 for some)
	$(RUN) -m ci.portable $(or $(RESULTS),build/results)/portable.json --rows "$(ROWS)" $(PROCESSES) $(ARGS)
ROWS ?=

# Ascend without an NPU (docs/ascend.md): each NPU_SHARE of the samples of every operator. NPU_FORMS=--slow-npu compiles
# every form of every kernel again, and not only those that want the most room.
NPU_VENV ?= .venv-npu
NPU_SHARE ?= 1/6
NPU := LD_LIBRARY_PATH=$(CURDIR)/$(NPU_VENV)/cann CANN_STUB_DEVICES=1 $(TEST_ENV) \
  $(NPU_VENV)/bin/python -W ignore -m pytest -q -m "not slow" -p ci.npu.simulate --backend npu $(PART:%=--part %)

$(NPU_VENV)/.stamp: $(ENV) ci/npu/environment.py
	@$(RUN) -m ci.npu.environment $(NPU_VENV)
	@touch $@

test-npu: $(NPU_VENV)/.stamp  ## Ascend on a CPU: simulated device, lowered kernels, the vendor's compiler
	@failed=0; \
	echo "== Ascend$(comma) simulated"; \
	$(NPU) $(PROCESSES) tests/kernels/test_npu.py tests/kernels/test_npu_kernels.py tests/ops/test_ops.py --share $(NPU_SHARE) $(NPU_FORMS) \
	  $(call keep,npu-simulated) $(ARGS) || failed=1; \
	echo "== Ascend$(comma) programs in the other order"; \
	ASCEND_GRID=reversed $(NPU) tests/kernels/test_npu_kernels.py $(if $(NPU_AGAIN),$(PROCESSES) $(NPU_AGAIN),-k planted) $(ARGS) || failed=1; \
	echo "== Ascend$(comma) interpreted"; \
	TRITON_INTERPRET=1 $(NPU) tests/kernels/test_npu_kernels.py $(if $(NPU_VIEWLESS),$(PROCESSES) $(NPU_VIEWLESS),-k planted) $(ARGS) || failed=1; \
	exit $$failed
NPU_FORMS ?=
NPU_AGAIN ?= tests/ops/test_ops.py -k "planted or kernel or (npu and float32 and forward_and_backward)" --share 1/10
# the interpreter gathers a view that has gaps, and then reads it by the strides that it had
NPU_VIEWLESS ?= $(subst forward_and_backward,forward_and_backward and not packed and not gaps and not sliced and not expanded,$(NPU_AGAIN))

# A part of it, where its environment can be had; one that can be had and is not built is a failure. What the vendor's compiler says of
# every form is listed, and the list has to be of today's sources: one chip's forms are compiled again. The reference is what the native
# tests run on the CPU that simulates the device: its mixed directions are enough to see that it runs there. Without WHOLE=1, float16 and
# spans of a middle length are left out as well.
NPU_SOME := '-k "not (compile_as_listed and 910_9589) and not (reference and (promised_bits or forward_and_backward or one_output)) \
  $(if $(WHOLE),,and not (matmuls_in_16_bits and float16) and not (change_no_result and 131072))"'
test-npu-some: $(ENV)
	@reason=$$($(RUN) -m ci.npu.environment --check $(NPU_VENV)); \
	case $$? in \
	  3) $(call skipped,npu-simulated,"$$reason") ;; \
	  *) $(MAKE) --no-print-directory test-npu NPU_SHARE=1/40 NPU_FORMS=$(NPU_SOME) NPU_AGAIN= ;; \
	esac

define SUITE_TRITON
if ! $(RUN) -c 'import triton' 2>/dev/null; then \
  $(call skipped,interpreted,"no Triton on this machine") \
  $(call skipped,cross-compiled,"no Triton on this machine") \
else \
  $(if $(INTERPRETED),echo "== kernels$(comma) interpreted"; TRITON_INTERPRET=1 $(PYTEST) $(NOT_SLOW) $(PROCESSES) --backend triton $(INTERPRETED) $(call keep,interpreted) $(ARGS) || failed=1;) \
  $(if $(COMPILED),echo "== kernels$(comma) cross-compiled"; $(PYTEST) $(NOT_SLOW) $(COMPILED) $(call keep,cross-compiled) $(ARGS) || failed=1;) \
  true; \
fi;
endef
comma := ,

define SLOW_TRITON
if $(RUN) -c 'import triton' 2>/dev/null; then \
  echo "== slow$(comma) interpreted"; \
  TRITON_INTERPRET=1 $(PYTEST) -m slow $(PROCESSES) --backend triton $(INTERPRETED) $(call keep,interpreted-slow) $(ARGS) || failed=1; \
fi;
endef

# What adapters and ZeRO are tested with, in a folder of its own: the rest of the suite imports what it always does.
ADAPTERS := $(VENV)/adapters
$(ADAPTERS): $(ENV)
	@$(RUN) -m pip install --quiet --no-deps --no-build-isolation --target $@.part \
	  bitsandbytes deepspeed einops hjson msgpack ninja nvidia-ml-py py-cpuinfo && mv $@.part $@

define ADAPTED
if $(if $(NO_VENV),true,$(MAKE) --no-print-directory $(ADAPTERS)); then \
  echo "== DeepSpeed and bitsandbytes"; \
  PYTHONPATH=$(abspath $(ADAPTERS))$${PYTHONPATH:+:$$PYTHONPATH} $(PYTEST) $(if $(DEVICE),--backend $(DEVICE)) \
    $(wildcard tests/patching/test_adapters.py tests/trainers/test_distributed.py tests/memory/test_planning.py) \
    $(addsuffix ::test_an_example_runs_and_learns,$(wildcard tests/tools/test_docs.py)) \
    -k "deepspeed or bitsandbytes" $(call keep,$(addsuffix -,$(DEVICE))adapters) $(ARGS) || failed=1; \
else echo "== DeepSpeed and bitsandbytes: not installed"; failed=1; fi;
endef

test-full: $(ENV)  ## the suite with the slow tests (PART=1/4: the first of four parts)
	@failed=0; \
	$(MAKE) --no-print-directory test WHOLE=1 || failed=1; \
	echo "== slow"; \
	$(PYTEST) -m slow $(if $(DEVICE),--backend $(DEVICE)) $(call keep,$(addsuffix -,$(DEVICE))slow) $(ARGS) || failed=1; \
	$(if $(DEVICE),,$(SLOW_TRITON)) \
	$(ADAPTED) \
	exit $$failed

test-trainers: $(ENV)  ## trainers with these operators, each in an environment of its own (NAME=trl)
	$(RUN) -m ci.trainers $(NAME) $(ARGS)
NAME ?=

test-liger: $(ENV)  ## the import names of Liger-Kernel beside the real package, minutes
	@test -d build/liger/liger_kernel || $(RUN) -m pip install --quiet --target build/liger --no-deps liger-kernel==0.8.5
	$(TEST_ENV) $(RUN) -m ci.liger build/liger --check $(ARGS)

seconds: $(ENV)  ## time the suite on this machine, for balanced parts; git diff shows tests/seconds.json
	$(MAKE) --no-print-directory test-full PART= ARGS="--record-seconds $(ARGS)"

doctor: $(ENV)  ## what this machine can use, and why not the rest
	$(RUN) -m liger_multi doctor

container:  ## the suite of BACKEND in its image, by docker, with that backend's devices
	RESULTS=$(RESULTS) ci/docker/run.sh $(or $(BACKEND),cpu)

lint: $(ENV)  ## format, lint, types, layering, generated pages
	@failed=; \
	for step in "ruff format --check ." "ruff check ." mypy ci.layering "ci.docs --check"; do \
	  echo "== $$step"; $(RUN) -m $$step || failed="$$failed $${step%% *}"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

check: lint  ## lint and the fast tests, under two minutes
	$(PYTEST) $(NOT_SLOW) $(PROCESSES) $(FAST) $(ARGS)

static: $(ENV)  ## compile some launches of every kernel for 8 GPUs and print what they cost there
	$(RUN) -m ci.static --store build/static.txt $(ARGS)

baseline: $(ENV)  ## write ci/baseline again; git diff shows what a change of a kernel costs
	$(RUN) -m ci.static --write $(ARGS)

static-full: $(ENV)  ## compile every launch in every variant (many minutes)
	$(RUN) -m ci.static --full --store build/static.txt $(ARGS)

tune: $(ENV)  ## measure this machine's launch table; git diff shows what was found
	$(RUN) -m benchmarks.tune table $(ARGS)

static-tables: $(ENV)  ## launch tables of AMD cards that nobody measured on, by a static model
	$(RUN) -m ci.static --tables $(ARGS)

bench: $(ENV)  ## time and memory of every operator on this machine, into benchmarks/results
	$(RUN) -m benchmarks.ops --store $(ARGS)

docs: $(ENV)  ## refresh what committed pages quote of contracts and results, and their pictures
	$(RUN) -m ci.docs
	$(RUN) -m benchmarks.pictures

pictures: $(ENV)  ## draw every picture of results again
	$(RUN) -m benchmarks.pictures --all

site: $(ENV)  ## the website in build/site: committed pages, and those made of contracts and results
	$(RUN) -m pip install --quiet $(CONSTRAINT:%=-c %) "mkdocs-material>=9.6"
	$(RUN) -m ci.docs --site build/pages
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict -f build/pages/mkdocs.yml

format: $(ENV)  ## rewrite the sources in the house format
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

clean:  ## remove what these targets made
	rm -rf .venv .venv-newest .venv-npu build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .cache demo-output .editable $(LINKS)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
