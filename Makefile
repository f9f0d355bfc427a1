.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help install demo test test-all test-rest check pythons docs docs-links wheel wheels fuzz mutants longer format results bench clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Make the virtual environment and install fedgist in it, with all for its tests

# torch first and pinned: unpinned it would bring gigabytes of GPU libraries
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedgist needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	$(PIP) --no-compile -c constraints.txt torch
	$(PIP) --no-compile -c constraints.txt -e ".[plot]"
	touch $(READY)

$(STAMP): $(READY)
	$(PIP) -c constraints.txt --group dev --group docs -e ".[plot,table,images,huggingface,tune,onnx,track,privacy,text,federation,ray,encoders,compiler]"
	touch $(STAMP)

demo: $(READY) ## A good minute, 1.1 GB: FedLog, local training and FedAvg on twenty clients with two kinds of model
	$(BIN)/fedgist run demo --out runs/demo/fedlog --overwrite
	$(BIN)/fedgist run demo --out runs/demo/local --overwrite --set method.name=local
	$(BIN)/fedgist run demo --out runs/demo/fedavg --overwrite --set method.name=fedavg
	$(BIN)/fedgist show runs/demo/fedlog runs/demo/local runs/demo/fedavg --figure runs/demo/accuracy.png
	$(BIN)/fedgist report runs/demo/fedlog runs/demo/local runs/demo/fedavg --title "The demo" -o runs/demo/report.html --figures runs/demo/figures

PYTEST := $(BIN)/python -m pytest --dist worksteal

# else each of many processes would compile all modules again
test test-all test-rest check longer: export PYTHONDONTWRITEBYTECODE =

# three workers on two cores, since one often waits for a subprocess
test: $(STAMP) ## What a change needs: lint, types, imports, and the tests of fedgist itself
	$(MAKE) --no-print-directory lint
	$(PYTEST) -n 3 --durations=20 -m "not environment"

test-all: $(STAMP) ## Also what tries the environment (browser, wheel, notebooks, LaTeX) and every subject
	$(MAKE) --no-print-directory lint
	$(PYTEST) -n 3 --durations=20

test-rest: $(STAMP) ## What test-all runs and test does not
	$(PYTEST) -n 3 -v --durations=20 -m environment

check: $(STAMP) ## The quick gate, 90 seconds: lint, types, imports, and all tests but the longer ones
	$(MAKE) --no-print-directory lint
	$(PYTEST) -n 2 -q --quick -m "not slow and not environment"

longer: $(STAMP) ## Write anew which tests are left out by make check: those of over 0.2 seconds
	$(PYTEST) -n 3 -q -m "not slow and not environment" --junitxml=build/times.xml
	$(BIN)/python tests/longer.py build/times.xml

pythons: ## The tests on each Python from 3.11 to 3.13 that is here; only some: make pythons PICK='-m "not slow"'
	.ci/pythons $(PICK)

.PHONY: lint
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## The documentation's site, in build/site/index.html; a warning is an error
	rm -rf docs/generated
	$(BIN)/sphinx-build -W --keep-going -q -b html -c docs . build/site

docs-links: docs ## Whether the links to other sites lead somewhere; needs the network
	$(BIN)/sphinx-build -q -b linkcheck -c docs . build/links

wheel: $(STAMP) ## The package, in dist/
	$(BIN)/python -m pip --disable-pip-version-check -q wheel --no-deps -w dist .

wheels: $(STAMP) ## Wheels with compiled kernels for Linux on x86-64 and aarch64, in dist/
	$(BIN)/python deploy/wheels.py dist

fuzz: $(STAMP) ## 10,000 broken recipes, records, checkpoints, data files and Python arguments; CASES=... for more
	PYTHONPATH=tests $(BIN)/python -m fuzz.suite --cases $(or $(CASES),10000)

mutants: $(STAMP) ## Whether each fault of mutants.toml is caught by its test, ten minutes; ONLY=7 for one
	PYTHONPATH=tests $(BIN)/python -m mutants $(if $(ONLY),--only "$(ONLY)")

results: $(STAMP) ## Work through the queue of results (ARGS="--plan", "--hours 8"), then make their pages
	$(BIN)/fedgist reproduce all $(ARGS)
	$(BIN)/python docs/scripts/results_page.py

bench: $(STAMP) ## Time and memory against bare PyTorch loops; writes bench.json
	$(BIN)/python bench/bench.py --out bench.json

clean: ## Remove the environment and what was made
	rm -rf $(VENV) .venv-3.* .venv-gpu build dist docs/generated fuzz-failures runs bench.json bench-gpu.json .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
