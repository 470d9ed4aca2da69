# make demo    set up a virtual environment, then upconv against PyTorch on two networks
# make test    set up a virtual environment, then format, lint, types and all tests
#
# Both need Python >= 3.10 with venv, and a C++ compiler; the rest is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
# The version the tests are written against; upconv itself takes any torch >= 2.9.
TORCH ?= 2.13.0
PYTEST_FLAGS ?= -n 2

BIN := $(VENV)/bin
CPP_FILES := $(shell find upconv/csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test check pytest format bench-cpu export-examples clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: check pytest

# Nothing here changes a file; `make format` does.
check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/mypy

pytest: $(VENV)/.test $(VENV)/.browser
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP_FILES)

# The plot of the README, from the committed results of the GPU; PLOT= names other files.
.PHONY: readme-plot
PLOT ?= $(wildcard benchmarks/results/h200-forward-*.json)
readme-plot: $(VENV)/.test
	$(BIN)/python benchmarks/readme_plot.py $(PLOT)

# The CPU table of the README: measures every 2-D case, then writes the table.
bench-cpu: $(VENV)/.test
	$(BIN)/upconv bench --device cpu --threads 2 --dims 2 --force \
	  --out benchmarks/results/cpu-2threads.json
	$(BIN)/python benchmarks/readme_table.py

# The exported files under examples/kernelbench, each from the reference beside it.
export-examples: $(VENV)/.test
	for case in kb57 kb65 kb69; do $(BIN)/upconv export examples/kernelbench/$${case}_reference.py \
	  --force -o examples/kernelbench/$$case.py || exit 1; done

# torch first and pinned: left to choose, pip takes the newest build with all its CUDA packages.
# numpy because torch warns at its first use when there is none.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "upconv needs Python 3.10 or newer; choose one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" numpy
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" -e .
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" -e '.[test]'
	touch $@

$(VENV)/.browser: $(VENV)/.test
	tools/install_browser.sh $(BIN)/python
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
