# `make train` and `make test` set up what they need; `make gpu` needs a GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests run side by side; `make test ARGS="-n 0"` runs them in one process.
SPREAD := -n 2 --dist worksteal

# Programs that find this first have a GPU that is simulated: tests/simgpu.
SIMULATED := PYTHONPATH=tests/simgpu/everywhere:tests

.PHONY: train test test-slow test-simgpu mutants check format docs gpu gpu-simulated clean

train: $(READY)
	$(BIN)/zbpp train $(ARGS)

test: $(READY)
	$(BIN)/pytest -m "not slow and not gpu" $(SPREAD) $(ARGS)

test-slow: $(READY)
	$(BIN)/pytest -m slow --durations 20 $(SPREAD) $(ARGS)
	$(SIMULATED) $(BIN)/pytest -p no:faulthandler -m slow $(SPREAD) tests/simgpu $(ARGS)

# Built by g++ for the installed torch, once.
test-simgpu: $(READY)
	@$(SIMULATED) $(BIN)/python -c "" # one builds it, not two at once
	$(SIMULATED) $(BIN)/pytest -p no:faulthandler -m "not slow" $(SPREAD) tests/simgpu tests/gpu $(ARGS)

# Mistakes put into the code, one at a time: some hours; ARGS="--room core" tries those
# of one room, "--room simgpu" those of the code for GPUs (5 to 10 minutes).
mutants: $(READY)
	$(BIN)/python tests/mutants.py $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p zbpp

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, build/site/index.html; a warning is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# In 9 minutes what only a GPU can show, into benchmarks/results/. With the torch of
# $(PYTHON): that of the virtual environment is built for CPUs. Downloads nothing.
gpu:
	@$(PYTHON) benchmarks/gpu --look
	rm -rf build/gpu
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --target build/gpu .
	PYTHONPATH=build/gpu $(PYTHON) benchmarks/gpu $(ARGS)

# The same as a dry run: figures of a simulated GPU claim nothing.
gpu-simulated: $(READY)
	$(SIMULATED) $(BIN)/python benchmarks/gpu --out build/gpu-simulated $(ARGS)

# The virtual environment; on a CPU machine the constraint keeps the CUDA build away.
$(READY): pyproject.toml setup.py constraints/cpu.txt $(wildcard schedules/planner/compiled/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints/cpu.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info
