"""Fixtures and options shared by all test files."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec

import pytest
import torch

# Where the workers of a run find the compile cache that was made for it: they start later and inherit the environment.
# Never a cache of an earlier run: it may be of other code. Set before the package is imported, which reads it once.
COMPILE_CACHE = "AITER_PAGED_FP8_CACHE_DIR"
WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not WORKER:
    os.environ[COMPILE_CACHE] = tempfile.mkdtemp(prefix="compiled-for-tests-")

from op_tests.cases import EXECUTORS, PATHS  # noqa: E402

FULL = os.environ.get("AITER_PAGED_FP8_TEST_FULL") == "1"


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    """Each executor that the behaviour must hold on."""
    return request.param


GPU = torch.cuda.is_available()
if not GPU:
    # Read by Triton when the kernels are first imported: without a GPU they can only run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
TRITON = find_spec("triton") is not None
#: Where none of them is asked for, files that look at the emulator or at FlyDSL's kernels have nothing to test, and the
#: machine may lack what they import.
NATIVE = any(PATHS[name] == "paged" for name in EXECUTORS)
#: Without the executor that knows all arguments, what names no executor is left to runs that have it.
ONLY_EXECUTORS = "torch" not in EXECUTORS

collect_ignore_glob: list[str] = []
# A test dependency like others: where its wheels exist, its absence is an error of the files that import it.
if not TRITON and sys.platform != "linux":
    collect_ignore_glob += ["test_triton*.py"]
if not NATIVE:
    collect_ignore_glob += ["test_emulator_*.py", "test_flydsl_*.py", "test_wild_native.py"]


def pytest_report_header() -> list[str]:
    if TRITON:
        how = "as compiled" if GPU else "in its interpreter"
    elif collect_ignore_glob:
        how = f"NOT TESTED: has no wheels for {sys.platform}"
    else:
        how = "ABSENT, which fails its tests (pip install triton)"
    lines = [f"GPU: {'yes' if GPU else 'no: tests marked gpu are deselected'}; Triton: {how}"]
    left_out = []
    if not NATIVE:
        left_out.append("the files of the emulator and of FlyDSL's kernels")
    if ONLY_EXECUTORS:
        left_out.append("every test that takes no executor, but Triton's own")
    if left_out:
        lines.append(f"executors: {', '.join(EXECUTORS)}; LEFT OUT: {'; '.join(left_out)}")
    return lines


def selected(item: pytest.Item) -> bool:
    """Whether a test says anything on this machine with these executors."""
    if item.get_closest_marker("gpu") is not None and not GPU:
        return False
    if not ONLY_EXECUTORS or item.path.name.startswith("test_triton"):
        return True
    return (
        isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and (item.callspec.params.get("executor") in EXECUTORS)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if selected(item)]
    config.hook.pytest_deselected(items=[item for item in items if not selected(item)])
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    # Two workers on two cores: more threads would only fight for them.
    if WORKER:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not WORKER:
        shutil.rmtree(os.environ[COMPILE_CACHE], ignore_errors=True)
