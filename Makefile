# `make demo` and `make test` are all a newcomer needs; both make .venv with the pinned set first.
PYTHON ?= python3
VENV = .venv
STAMP = $(VENV)/.installed

.PHONY: demo test test-slow lint readme clean

# one recipe of every family: the whole book takes twice as long
DEMO = bf16 int8-dynamic torchao-int8-weight fp8-weight bnb-nf4 onnx-int8-dynamic openvino-int8

demo: $(STAMP)
	$(VENV)/bin/qtool sweep demo $(DEMO:%=--recipe %)

test: $(STAMP)
	$(VENV)/bin/python -m pytest -m "not slow and not gpu"

test-slow: $(STAMP)
	# two files at a time; waiting threads must not spin on the other's core (no test asserts a time)
	OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -m slow -n 2 --dist loadfile

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

# the README's table of recipes, from the recipe files; a test says when it is out of date
readme: $(STAMP)
	$(VENV)/bin/python -m qtool.listing README.md

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qtool needs Python 3.11 or newer, found " + sys.version.split()[0])'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info
