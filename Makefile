# make demo   sets up .venv and runs the main job: 4 ranks, one of which fails in backward, ending in the verdict
# make test   sets up .venv and runs all checks and tests (what CI runs)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: setup check lint types unit integration scenarios test demo bench clean

setup: $(VENV)/.done

# The CPU build of torch first: a bare requirement would bring several GB of CUDA.
$(VENV)/.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

unit:
	$(BIN)/python -m pytest -W error -m 'not integration'

integration:
	$(BIN)/python -m pytest -W error -m integration

# All jobs with known faults, also those that are like another: some 15 minutes on 2 cores.
scenarios:
	SCENARIOS=all $(BIN)/python -m pytest -W error tests/integration/test_scenarios.py

check: lint types
	$(BIN)/python -m pytest -W error

test: setup
	$(MAKE) check

demo: setup
	PYTHON="$(abspath $(BIN))/python" bash launch/demo.sh

bench: setup
	for bench in benchmarks/[a-z]*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache distdbg-runs
