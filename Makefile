# Every target builds what it needs in .venv. Variables:
#   PYTHON=python3.12        interpreter that .venv is made of (a CUDA, ROCm or Ascend PyTorch in it is kept and used)
#   NO_VENV=1                run with $(PYTHON) as it is and install nothing
#   BACKEND=cuda             run the suite natively on that backend's device (cpu, the default: all that a CPU can run)
#   RESULTS=folder           leave what ran where, with its counts, as JSON and JUnit files
#   TORCH, TORCH_INDEX       PyTorch for a machine whose $(PYTHON) has none (CPU build, or CUDA with an NVIDIA device)
#   CONSTRAINT=file          versions of everything else (ci/constraints/pinned.txt; empty for the newest)
#   WORKERS=2                test processes
#   PART=1/4                 the first of four parts of test or test-full, which together are all of it
#   ARGS="..."               further arguments of what the target runs
PYTHON ?= python3
VENV ?= .venv
NPU_VENV ?= .venv-npu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
CONSTRAINT ?= ci/constraints/pinned.txt
BACKEND ?=
WORKERS ?= 2
PART ?=
RESULTS ?=
NAME ?=
ROWS ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env demo test test-full test-npu test-portable test-trainers test-liger check lint format static verify tune bench docs site pins \
  doctor container clean

LINKS := liger_multi/backends liger_multi/reference
ifdef NO_VENV
RUN := $(PYTHON)
ENV := $(LINKS)
DEMO_ENV := $(LINKS)
else
RUN := $(VENV)/bin/python
ENV := $(VENV)/.stamp $(LINKS)
# The demo needs less than the tests do, which add the rest to the same environment: a minute in place of several.
DEMO_ENV := $(or $(wildcard $(VENV)/.stamp),$(VENV)/.demo) $(LINKS)
endif

# One thread a process: the processes fill the cores. Compiled files are kept: without them every process rewrites all assertions again.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
SUITE := $(TEST_ENV) $(RUN) -m ci.suite --npu-venv $(NPU_VENV) --workers $(WORKERS) $(PART:%=--part %) $(RESULTS:%=--results %)
DEVICE := $(filter-out cpu,$(BACKEND))
FAST := tests/tools/test_harness.py tests/tools/test_ci_files.py tests/dispatch/test_import.py tests/dispatch/test_dispatch.py
BUILD := $(PYTHON) -m ci.venv $(VENV) --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)" --constraint "$(CONSTRAINT)"

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@sed -n '/^# /s/^# //p;/^PYTHON/q' $(MAKEFILE_LIST)

env: $(ENV)  ## the environment alone

$(VENV)/.stamp: pyproject.toml setup.py ci/venv.py ci/constraints/pinned.txt liger_multi/_version.py
	$(BUILD) --extras test
	@touch $@

$(VENV)/.demo: pyproject.toml setup.py ci/venv.py ci/constraints/pinned.txt liger_multi/_version.py
	$(BUILD) --extras transformers,cli --no-triton
	@touch $@

$(LINKS):
	@test -e $@ || ln -s ../$(notdir $@) $@

demo: $(DEMO_ENV)  ## train two small models, unpatched and patched, and compare them
	HF_HUB_OFFLINE=1 $(RUN) -m liger_multi demo --overwrite $(ARGS)

test: $(ENV)  ## the suite: native, kernels interpreted and cross-compiled, Ascend simulated (BACKEND=cuda: on a device)
	$(SUITE) $(DEVICE:%=--backend %) $(ARGS)

test-full: $(ENV)  ## the suite with the slow tests (PART=1/4: the first of four parts)
	$(if $(NO_VENV),,$(MAKE) --no-print-directory $(VENV)/adapters)
	$(SUITE) --slow $(DEVICE:%=--backend %) $(ARGS)

test-npu: $(ENV)  ## Ascend on a CPU: simulated device, lowered kernels, the vendor's compiler (docs/ascend.md)
	$(SUITE) --backend ascend $(ARGS)

test-portable: $(ENV)  ## the native suite under other instruction sets, numbers of threads and orders (hours; ROWS=1,4 for some)
	$(TEST_ENV) $(RUN) -m ci.portable $(or $(RESULTS),build/results)/portable.json --rows "$(ROWS)" -n $(WORKERS) $(ARGS)

test-trainers: $(ENV)  ## trainers with these operators, each in an environment of its own (NAME=trl)
	$(RUN) -m tests.trainers.runs.driver $(NAME) $(ARGS)

test-liger: $(ENV)  ## Liger-Kernel's own tests with our import names (ARGS="--release liger-kernel": the newest)
	$(TEST_ENV) $(RUN) -m tests.trainers.liger_suite build/liger $(ARGS)

# DeepSpeed and bitsandbytes stand in a folder of their own: the rest of the suite imports what it always does.
$(VENV)/adapters: $(ENV)
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --target $@.part \
	  bitsandbytes deepspeed einops hjson msgpack ninja nvidia-ml-py py-cpuinfo
	mv $@.part $@

check: lint  ## lint and the fast tests, under two minutes
	$(TEST_ENV) $(RUN) -m pytest -q -m "not slow" -n $(WORKERS) $(FAST) $(ARGS)

lint: $(ENV)  ## format, lint, types, layering, generated pages
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m ci.layering
	$(RUN) -m ci.docs --check

format: $(ENV)  ## rewrite the sources in the house format
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

static: $(ENV)  ## compile some launches of every kernel for 8 GPUs (ARGS=--full: every launch; --write: the baseline again)
	$(RUN) -m ci.static --store build/static.txt $(ARGS)

verify: $(ENV)  ## which operators are right on this machine, with its driver and compiler (docs/verified.md)
	$(if $(RESULTS),mkdir -p $(RESULTS)/verify && )$(RUN) -m liger_multi verify $(if $(DEVICE),,--quick) $(RESULTS:%=--report %/verify/report.json) $(ARGS)

tune: $(ENV)  ## measure this machine's launch table; git diff shows what was found
	$(RUN) -m benchmarks.tune table $(ARGS)

bench: $(ENV)  ## README's models beside installed peers in ten minutes, into benchmarks/results (NAME="models table", NAME=ops)
	$(RUN) -m benchmarks.$(or $(NAME),models readme) --store $(ARGS)

docs: $(ENV)  ## refresh the generated tables of pages, and their pictures (ARGS=--all: every picture)
	$(RUN) -m ci.docs
	$(RUN) -m benchmarks.pictures $(ARGS)

site: $(ENV)  ## the website in build/site
	$(RUN) -m pip install --quiet $(CONSTRAINT:%=-c %) "mkdocs-material>=9.6"
	$(RUN) -m ci.docs --site build/pages
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict -f build/pages/mkdocs.yml

pins:  ## the newest versions into ci/constraints/pinned.txt
	$(PYTHON) -m ci.venv $(VENV)-newest --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)" --constraint "" --extras test,docs
	$(VENV)-newest/bin/python -m ci.venv --write-pins

doctor: $(ENV)  ## what this machine can use, and why not the rest
	$(RUN) -m liger_multi doctor

container:  ## the suite of BACKEND in its image, by docker, with that backend's devices
	RESULTS=$(RESULTS) ci/docker/run.sh $(or $(BACKEND),cpu)

clean:  ## remove what these targets made
	rm -rf .venv .venv-newest .venv-npu build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .cache demo-output .editable $(LINKS)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
