"""Fixtures and options shared by all test files."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

from op_tests.cases import EXECUTORS

FULL = os.environ.get("AITER_PAGED_FP8_TEST_FULL") == "1"
# Where the workers of a run find the compile cache that was made for it.
COMPILE_CACHE = "AITER_PAGED_FP8_TEST_COMPILE_CACHE"

_made_here = pytest.StashKey[str]()


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    """Each executor that the behaviour must hold on."""
    return request.param


def pytest_configure(config: pytest.Config) -> None:
    # Two workers on two cores: more threads would only fight for them.
    if os.environ.get("PYTEST_XDIST_WORKER"):
        import torch

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
    if not hasattr(config, "workerinput"):
        # Workers start later and inherit the environment. Never a cache of an earlier run: it may be of other code.
        config.stash[_made_here] = os.environ[COMPILE_CACHE] = tempfile.mkdtemp(prefix="compiled-for-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    made = config.stash.get(_made_here, None)
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)
        os.environ.pop(COMPILE_CACHE, None)
