"""Fixtures and options shared by all test files."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

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


def pytest_configure(config: pytest.Config) -> None:
    # Two workers on two cores: more threads would only fight for them.
    if WORKER:
        import torch

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not WORKER:
        shutil.rmtree(os.environ[COMPILE_CACHE], ignore_errors=True)
