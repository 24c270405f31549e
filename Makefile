# What a command needs is built on its first run: little for `make demo`, all for `make test-rest`; later runs find it ready.
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help environment demo-environment tests-environment demo demo-torchrun demo-tensorflow test test-rest test-all lint docs docs-serve bench cluster-bench figures clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

environment:  ## Build .venv: pinned packages, Open MPI, and Horovod compiled from source
	@scripts/environment.sh

demo-environment:
	@scripts/environment.sh demo

tests-environment:
	@scripts/environment.sh tests

demo: demo-environment  ## Train on handwritten digits with 4 ranks: dense, OkTopk and StepAhead; and compare
	@$(BIN)/python -m benchmarks.accuracy.demo

demo-torchrun:  ## The same without Horovod, MPI and a compiler: PyTorch alone, by torchrun
	@scripts/environment.sh torchrun
	@$(BIN)/python -m benchmarks.accuracy.demo --launcher torchrun

demo-tensorflow: tests-environment  ## Train a Keras model in the same way, with TensorFlow
	@$(BIN)/python -m benchmarks.accuracy.demo --framework tensorflow

test: tests-environment  ## Run the quick tests, of every part of the package (tests/README.md)
	@$(BIN)/python -m pytest -m "not slow and not launches" --numprocesses 3 --dist worksteal
	@$(BIN)/python -m pytest -m "not slow and launches"

test-rest: environment  ## Run the tests that `make test` leaves out
	@$(BIN)/python -m pytest -m "slow and not launches" --numprocesses 3 --dist loadgroup --durations 15
	@$(BIN)/python -m pytest -m "slow and launches" --durations 25

test-all: environment  ## Run all tests, and print the lines of the package that were run
	@$(BIN)/python -m pytest --cov --cov-config pyproject.toml

lint: tests-environment  ## Check style, types, and who imports whom
	@$(BIN)/ruff check .
	@scripts/typecheck.sh
	@scripts/imports.sh

docs:  ## Build the documentation site in site/, in an environment of its own
	@scripts/docs.sh build

docs-serve:  ## Show the documentation site at http://127.0.0.1:8000, made anew when a page changes
	@scripts/docs.sh serve

bench: tests-environment  ## Measure the cost of a step without the network, of the core and in both frameworks
	@$(BIN)/python -m benchmarks.local.step
	@$(BIN)/python -m benchmarks.local.plugin

cluster-bench: tests-environment  ## Measure allreduces and training on network namespaces at 1 Gbit/s (needs root, iproute2)
	@$(BIN)/python -m benchmarks.cluster.compare
	@$(BIN)/python -m benchmarks.cluster.training

figures: tests-environment  ## Measure the papers' figures again: tables, docs/data/paper.json and docs/images/paper_*.png
	@$(BIN)/python -m benchmarks.paper.figures

clean:  ## Remove the environment and everything that was built (the cached Horovod wheel stays)
	rm -rf .venv .docs-venv site build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.*
