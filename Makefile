# Two commands on a fresh machine, each doing all its set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# What a machine without torch gets: one known release, since a bare `torch` may pull gigabytes of GPU libraries.
TORCH ?= torch==2.13.0
# What a machine without Triton gets, for its interpreter: the package needs none. The torch of a GPU brings its own.
TRITON ?= triton==3.9.0
JOBS ?= 2

.PHONY: demo test test-full test-gpu lint format bench wheel clean
.DEFAULT_GOAL := demo

$(VENV)/.ready: requirements.txt Makefile
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  echo "using the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(PY) -m pip install --quiet --disable-pip-version-check '$(TORCH)'; \
	fi
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@if $(PY) -c 'import triton' 2>/dev/null; then \
	  echo "using the Triton that is here"; \
	elif [ "$$(uname -s)" = Linux ]; then \
	  $(PY) -m pip install --quiet --disable-pip-version-check '$(TRITON)'; \
	else \
	  echo "WARNING: Triton has no wheels for $$(uname -s): op_tests/test_triton*.py will not run" >&2; \
	fi
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(VENV)/.ready
	$(PY) -m aiter_paged_fp8 demo

test: $(VENV)/.ready
	$(PY) -m pytest -n $(JOBS) op_tests

# Which tests: all, or those that do more here than in `make test`.
FULL ?= op_tests
test-full: $(VENV)/.ready
	AITER_PAGED_FP8_TEST_FULL=1 $(PY) -m pytest -n $(JOBS) $(FULL)

# On a machine with a GPU: what tells something of the Triton provider there. Workers share the GPU and what they compile
# (TRITON_CACHE_DIR); each starts with neighbours, which mostly need the same kernels. Tests that hand CPU tensors to the
# public function themselves are left to `make test`.
GPU_JOBS ?= 14
GPU_TESTS ?= $(addprefix op_tests/test_,triton.py triton_wild.py accuracy.py contract.py failure_modes.py)
GPU_LEFT_OUT := contract.py::test_out_alone_writes_nothing_else contract.py::test_outputs_given_or_not
test-gpu: $(VENV)/.ready
	AITER_PAGED_FP8_TEST_EXECUTORS=triton $(PY) -m pytest -n $(GPU_JOBS) --dist worksteal $(GPU_TESTS) \
	  $(addprefix --deselect op_tests/test_,$(GPU_LEFT_OUT))

lint: $(VENV)/.ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy .github/scripts/refresh_times.py
	$(VENV)/bin/shellcheck .github/scripts/*.sh .ci/run

format: $(VENV)/.ready
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(VENV)/.ready
	$(PY) -m benchmarks.bench_fallback
	$(PY) -m benchmarks.bench_overhead
	$(PY) -m benchmarks.bench_emulator

wheel: $(VENV)/.ready
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache
