# The KV Cache Lab. Needs Python 3.11-3.13, pip, make and git; everything else is fetched as packages.
# make lab PYTHON=/path/to/python   takes torch from that environment instead of fetching it again.

SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo $$p; exit; }; done; echo python3)
# an interpreter that the caller named may bring its own torch; the one found above may not
REUSE := $(if $(filter command environment,$(firstword $(origin PYTHON))),--reuse-torch,)
VENV := .venv
PY := $(VENV)/bin/python
# the GPU bench runs with what a machine has
BENCH_PY := $(if $(wildcard $(PY)),$(PY),$(PYTHON))
LAB_FLAGS ?=
# threads that wait instead of spinning: kvlab/__init__.py says why
export OMP_WAIT_POLICY ?= passive
PORT ?= 8000

.PHONY: help lab lab-setup env setup test book lint format unit parity kernels chapters twice build browser slow fuzz soak quality gemma bench-gpu clean-chapters check-chapters clean distclean

help: ## what can be made
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

lab: lab-setup ## set up everything and open JupyterLab on the chapters (LAB_FLAGS=--no-browser ...)
	@$(PY) tools/open_lab.py $(LAB_FLAGS)

lab-setup: ## all of `make lab` but opening it
	@$(PYTHON) tools/setup_env.py $(REUSE) --model --kernel

env: ## .venv with the pinned packages and kvlab, no model
	@$(PYTHON) tools/setup_env.py $(REUSE)

setup: lab-setup ## lab-setup, and the JavaScript that the pages carry
	@$(PY) tools/assets.py

test: ## everything that CI runs, with its own set-up; ends with a table of times
	@$(PYTHON) tools/ci.py $(REUSE)

lint: env ## ruff: rules and format
	@$(PY) tools/ci.py --only lint

format: env ## rewrite the Python files in the project's format
	@$(VENV)/bin/ruff format kvlab tests tools && $(VENV)/bin/ruff check --fix kvlab tests tools

unit: setup ## the unit tests
	@$(PY) tools/ci.py --only unit

parity: setup ## the engine against transformers, tiny models of each family
	@$(PY) tools/ci.py --only parity

kernels: setup ## operations and storage formats against their plain references
	@$(PY) tools/ci.py --only kernels

chapters: setup ## execute every chapter whose inputs changed
	@$(PY) tools/ci.py --only chapters

twice: setup ## every chapter twice in one kernel, as Run All pressed again
	@$(PY) tools/run_twice.py

build: setup ## the published book in _build/html
	@$(PY) tools/build_book.py

browser: setup ## open the built book in headless Chromium
	@$(PY) tools/ci.py --only browser

book: build ## build the book and serve it on http://127.0.0.1:8000 (PORT=...)
	@$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

slow: setup ## long prompts, all configurations with two seeds, a fixed sample of the full kernel product
	@$(PY) tools/recorded.py slow

fuzz: setup ## random schedules for ten minutes (FUZZ_SECONDS=...)
	@$(PY) tools/recorded.py fuzz

soak: setup ## half an hour of load on the server (SOAK_SECONDS=..., SOAK_RATE=... requests a second)
	@$(PY) tools/recorded.py soak

quality: setup gemma ## KL, perplexity and passkeys of every storage format (hours; fetches Gemma 3 270M)
	@$(PY) tools/recorded.py quality

gemma: lab-setup ## fetch the optional second model, Gemma 3 270M (Gemma terms of use), about 250 MB
	@$(PY) tools/setup_env.py --gemma

bench-gpu: ## check every Triton kernel on this machine's GPU, then measure it (STAGE=decode runs one stage again)
	@$(BENCH_PY) -c 'import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, ("torch", "triton", "numpy"))))' \
	  || { echo 'make bench-gpu: needs torch >= 2.11, triton >= 3.6 and numpy, and nothing else, in $(BENCH_PY)' >&2; exit 2; }
	@$(BENCH_PY) -m kvlab.lab.bench_gpu $(if $(STAGE),--stage $(STAGE),)

clean-chapters: ## take outputs out of the chapters, before a commit
	@$(PYTHON) tools/clean_chapters.py

check-chapters: ## list what in the chapters breaks a rule
	@$(PYTHON) tools/check_chapters.py

clean: ## remove what a build made
	@rm -rf build _build .pytest_cache .ruff_cache node_modules

distclean: clean ## remove .venv too
	@rm -rf $(VENV)
