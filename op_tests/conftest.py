"""Fixtures and options shared by all test files."""

from __future__ import annotations

import os

import pytest

from op_tests.cases import EXECUTORS

FULL = os.environ.get("AITER_PAGED_FP8_TEST_FULL") == "1"


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
