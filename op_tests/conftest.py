"""Fixtures and options shared by all test files."""

from __future__ import annotations

import os
import shutil
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

from op_tests.cases import EXECUTORS  # noqa: E402

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
collect_ignore = [] if TRITON else ["test_triton.py"]


def pytest_report_header() -> list[str]:
    how = ("as compiled" if GPU else "in its interpreter") if TRITON else "absent: test_triton.py is not collected"
    return [f"GPU: {'yes' if GPU else 'no: tests marked gpu are deselected'}; Triton: {how}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if GPU:
        return
    kept = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu") is not None])
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    # Two workers on two cores: more threads would only fight for them.
    if WORKER:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not WORKER:
        shutil.rmtree(os.environ[COMPILE_CACHE], ignore_errors=True)
