.PHONY: help style tables quality test nightly test-gpu smoke

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

style:  ## format and fix
	ruff format . && ruff check --fix .

tables:  ## write the tables of README.md and docs/ from experiments/results/
	python -m experiments.plots.tables

quality:  ## check without changing: format, lint, imports between rooms, tables
	ruff check .
	ruff format --check .
	lint-imports
	python -m experiments.plots.tables --check

test:  ## the short tests, in two processes (one: pytest -n 0)
	pytest

nightly:  ## the short tests and the slow ones, none that needs a GPU
	pytest -m "(slow or not slow) and not gpu"

test-gpu:  ## the tests marked gpu
	pytest -m gpu

smoke:  ## two epochs on digits, no tracker
	accelerate launch train.py --small-ratio 0.1 --epochs 2 --report-to none
