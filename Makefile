# Needs python3 (3.10 to 3.13), make and the package index. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS ?= $(filter-out tests/run/test_tvm_%,$(wildcard tests/*/test_*.py))

.PHONY: demo test test-tvm devices bench lint format clean

demo: $(STAMP)
	$(BIN)/treeattn demo

# Each file in a process of its own, so that a crash in one cannot hide in another; JOBS of them at a time.
JOBS ?= 2
test: $(STAMP)
	@printf '%s\n' $(TESTS) | xargs -P $(JOBS) -I FILE sh -c 'log=$$(mktemp); $(BIN)/python -m pytest FILE >$$log 2>&1; \
	status=$$?; echo FILE; cat $$log; rm $$log; test $$status = 0 -o $$status = 5 || { echo "FAILED FILE"; exit 1; }'

test-tvm: $(STAMP)
	$(MAKE) test TESTS="$(wildcard tests/run/test_tvm_*.py)"

# What tests/gpu can use: PoCL, WebGPU and a disassembler by pip; Mesa's Vulkan and Oclgrind where apt-get may install.
devices: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,pocl,webgpu,cuda-checks]'
	@if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	apt-get install -y -qq mesa-vulkan-drivers oclgrind >/dev/null || { apt-get update -qq && apt-get install -y -qq mesa-vulkan-drivers oclgrind >/dev/null; }; \
	else echo "not root, or no apt-get: for WebGPU and Oclgrind tests install mesa-vulkan-drivers and oclgrind yourself"; fi

bench: $(STAMP)
	$(BIN)/treeattn bench $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/size_budget.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 14) else "treeattn needs Python 3.10 to 3.13, and $(PYTHON) is %d.%d; try: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
