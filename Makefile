# `make demo` and `make test` set up everything they need on a machine that has Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help install demo pictures test lint types unit bench study wheel clean

help:  ## what this file can do
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## make .venv and install steppe with its test tools

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

DEMO := runs/demo
ANALYSES := landscape spectrum radius sharpness robustness
landscape_options := --n 25
radius_options := --directions 8
robustness_options := --seeds 3 --draws 2

demo: $(STAMP)  ## compare the paper's six methods on digits, compress a small ResNet, look at minima, write a page
	$(BIN)/steppe compare sgd sam:rho=.2 rwp arwp m-rwp m-arwp rwp:rise=.2 --recipe digits --seeds 10 --eval-every 3 \
		--store $(DEMO) --out $(DEMO)/noisy.json
	@echo; echo "A small ResNet, no label wrong: equal accuracy, and what rounding and pruning leave of it:"; echo
	$(BIN)/steppe compare sgd rwp rwp:rise=.2 --recipe digits-resnet --label-noise 0 --seeds 4 --eval-every 30 \
		--store $(DEMO) --out $(DEMO)/resnet.json
	@echo; echo "How flat are the minima, and what do they bear? Landscape, spectrum, radius, sharpness, robustness:"; echo
	$(MAKE) --no-print-directory -j 2 $(ANALYSES:%=demo-%)
	@echo
	$(BIN)/steppe report $(DEMO)/noisy.json --store $(DEMO) --out $(DEMO)/report.html

pictures: demo  ## run the demo, then write pictures and tables of README and docs
	$(BIN)/python -m docs.pictures

demo-%: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/steppe analyze $* $(DEMO)/noisy.json $($*_options) --store $(DEMO)

BENCHMARKS := step scaling launches memory parallel imports

test: lint types unit  ## lint, types and tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(STAMP)  ## run every benchmark (on two idle cores) and write docs/performance.md
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/memory.py --lora
	$(BIN)/python benchmarks/page.py

study: $(STAMP)  ## train what is missing of a study (NAME=digits), or list them all
	$(BIN)/python -m studies $(NAME) $(OPTIONS)

wheel: $(STAMP)  ## build the wheel and the source package into dist/ and check them
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean:  ## remove what the commands above made
	rm -rf .venv dist .mypy_cache .pytest_cache .ruff_cache
