# Two commands set everything up on a fresh machine: `make demo` and `make test`.
#
#   make demo         convert the embedded checkpoint and show stock beside scaled
#   make test         lint, types and tests on the newest transformers
#   make test-4.57    the tests on the oldest supported transformers
#   make test-slow    the tests that take minutes
#   make hostile      hostile input and faults, and a table of what was tried and survived
#   make evidence     train the small models that are missing, measure them, write the tables (an hour)
#   make benchmark    speed and memory, side by side
#   make wheel        build the wheel

PYTHON ?= python3
# A process a core, and one more, since many tests wait for a Hub or for other processes; threads of their
# own would only wait for each other.
WORKERS := $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")
PYTEST := -m pytest -n $(WORKERS) --dist worksteal -q

# How long make hostile tries each of the two; it takes longer if the examples alone do.
SECONDS ?= 300

.PHONY: demo test lint test-4.57 test-slow hostile evidence benchmark wheel clean

demo: .venv/ready
	.venv/bin/python examples/demo.py

test: lint
	.venv/bin/python $(PYTEST) -m "not slow"

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test-4.57: .venv-4.57/ready
	.venv-4.57/bin/python $(PYTEST) -m "not slow"

test-slow: .venv/ready
	.venv/bin/python $(PYTEST) -m slow

hostile: .venv/ready
	.venv/bin/python -m tests.hostile --seconds $(SECONDS); hostile=$$?; \
	.venv/bin/python -m tests.faults --seconds $(SECONDS) && exit $$hostile

evidence: .venv/ready
	.venv/bin/python examples/evidence.py

benchmark: .venv/ready
	.venv/bin/python benchmarks/torch_speed.py
	.venv/bin/python benchmarks/conversion.py
	.venv/bin/python benchmarks/onnx_speed.py

wheel: .venv/ready
	.venv/bin/python -m build --wheel

# Versions are pinned in the constraints; pyproject.toml keeps its ranges open.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,onnx]"
	touch $@

.venv-4.57/ready: pyproject.toml constraints-4.57.txt
	$(PYTHON) -m venv .venv-4.57
	.venv-4.57/bin/python -m pip install --quiet --constraint constraints-4.57.txt --editable ".[dev,onnx]"
	touch $@

clean:
	rm -rf .venv .venv-4.57 build dist demo-out demo-out.jsonl
