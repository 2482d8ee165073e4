.PHONY: help style quality test test-gpu smoke

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

style:  ## format and fix
	ruff format . && ruff check --fix .

quality:  ## check without changing
	ruff format --check . && ruff check .

test:  ## all tests that need no GPU
	pytest

test-gpu:  ## the tests marked gpu
	pytest -m gpu

smoke:  ## two epochs on digits, no tracker
	accelerate launch train.py --small-ratio 0.1 --epochs 2 --report-to none
