# `make train` and `make test` set up what they need; `make gpu` needs a GPU.
# RELEASES=newest or RELEASES=lowest takes those releases of every dependency that
# pyproject.toml allows, in an environment of their own.
PYTHON ?= python3
VENV := $(if $(RELEASES),build/$(RELEASES),.venv)
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Three workers for two cores, because tests wait for a third of the time.
# `make test ARGS="-n 0"` runs all in one process. A process that crashes ends the run:
# pytest-xdist 3.8 would replace it, and may then wait without an end.
SPREAD := -n 3 --max-worker-restart 0

# Programs that find this first have a GPU that is simulated: tests/simgpu.
SIMULATED := PYTHONPATH=tests/simgpu/everywhere:tests

# The instructions of an older processor.
OLDER := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE

.PHONY: train test test-nightly test-simgpu test-pythons mutants check docs dist gpu

train: $(READY)
	$(BIN)/zbpp train $(ARGS)

test: $(READY)
	$(BIN)/pytest -m "not slow and not gpu" $(SPREAD) $(ARGS)

# What takes long and repeats, with more cases, what the others have shown; and that
# results do not depend on the kernels that a processor chooses for a shape.
KERNEL_ROOMS := tests/bits tests/models tests/split

test-nightly: $(READY)
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -m nightly --durations 20 $(SPREAD) $(ARGS)
	$(SIMULATED) $(BIN)/pytest -p no:faulthandler -m slow $(SPREAD) tests/simgpu $(ARGS)
	HYPOTHESIS_PROFILE=nightly $(OLDER) $(BIN)/pytest -m "not slow and not gpu" \
	  $(SPREAD) $(ARGS)
	$(OLDER) PYTHONPATH=$(CURDIR)/tests/other_kernels $(BIN)/pytest \
	  -m "not slow and not gpu" $(SPREAD) $(KERNEL_ROOMS) $(ARGS)

# Built by g++ for the installed torch, once.
test-simgpu: $(READY)
	@$(SIMULATED) $(BIN)/python -c "" # one builds it, not two at once
	$(SIMULATED) $(BIN)/pytest -p no:faulthandler -m "not slow" $(SPREAD) tests/simgpu tests/gpu $(ARGS)

# Planning and its data, without torch, under other Pythons.
PYTHONS := 3.12 3.13
TORCHLESS := tests/core tests/plans
WITH_TORCH := model_memory plan_files requests

test-pythons:
	set -e; for python in $(PYTHONS); do \
	  export PYENV_VERSION=$$python; \
	  python$$python -m venv --clear build/python$$python; \
	  build/python$$python/bin/pip install --quiet -e . \
	    hypothesis jsonschema psutil pytest pytest-timeout pytest-xdist; \
	  build/python$$python/bin/pytest -m "not slow" $(SPREAD) $(TORCHLESS) \
	    tests/test_public_names.py tests/repo/test_layers.py \
	    $(WITH_TORCH:%=--ignore=tests/plans/test_%.py) $(ARGS); \
	done

# Mistakes put into the code, one at a time: some hours; ARGS="--room core" tries those
# of one room, "--room simgpu" those of the code for GPUs (an hour).
mutants: $(READY)
	$(BIN)/python tests/mutants.py $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p zbpp
	PYTHONPATH=src $(BIN)/lint-imports --no-logo
	$(BIN)/python tests/mutants.py --list

# The files to upload: build/dist/ has the sdist, and the wheel that was built of it, with
# the oldest glibc that its symbols allow in its name. Nothing is uploaded.
dist: $(READY)
	rm -rf build/dist build/linux
	$(BIN)/python -m build --outdir build/linux .
	mkdir -p build/dist && mv build/linux/*.tar.gz build/dist
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/dist build/linux/*.whl
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/check-wheel-contents build/dist/*.whl

# The documentation site, build/site/index.html; a warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# In some minutes what only a GPU can show, into benchmarks/results/. With the torch of
# $(PYTHON): that of the virtual environment is built for CPUs. Downloads nothing.
gpu:
	@$(PYTHON) benchmarks/gpu.py --look
	rm -rf build/gpu
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --target build/gpu .
	PYTHONPATH=build/gpu $(PYTHON) benchmarks/gpu.py $(ARGS)

# The virtual environment; on a CPU machine the constraint keeps the CUDA build away.
# All cores compile what is installed: pip takes one, and three times as long; left to
# the tests, each of their processes does it. What is for newer Pythons stays as it is,
# and large packages of which tests import little.
NEWEST_OR_LOWEST = $(BIN)/pip install --quiet uv && $(BIN)/uv pip install --quiet \
	  --python $(BIN)/python -e ".[dev]" \
	  --resolution $(if $(filter newest,$(RELEASES)),highest,lowest-direct)
SELDOM := /(transformers|pandas|peft|pip|debugpy|IPython|prompt_toolkit|fontTools)/
$(READY): pyproject.toml setup.py constraints/cpu.txt $(wildcard schedules/planner/compiled/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(if $(RELEASES),$(NEWEST_OR_LOWEST),$(BIN)/pip install --quiet --no-compile -c constraints/cpu.txt -e ".[dev]")
	$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true
	touch $(READY)
