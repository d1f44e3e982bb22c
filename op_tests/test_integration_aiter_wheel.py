"""The integration on AITER's real wheel, opt-in: AITER_PAGED_FP8_TEST_AITER_PYTHON names a Python that has it.

    python -m venv wheel
    wheel/bin/pip install --no-deps amd-aiter==0.1.7.post2.dev18
    wheel/bin/pip install torch triton pybind11 pandas einops psutil packaging pytest threadpoolctl ml_dtypes
    AITER_PAGED_FP8_TEST_AITER_PYTHON=wheel/bin/python python -m pytest op_tests/test_integration_aiter_wheel.py

No GPU and no ROCm are needed: a program that prints hipconfig's version, and the enums that AITER would compile, let
it import.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
VARIABLE = "AITER_PAGED_FP8_TEST_AITER_PYTHON"
VERSION = "0.1.7.post2.dev18"
PYTHON = os.environ.get(VARIABLE)
wheel = pytest.mark.skipif(not PYTHON, reason=f"opt-in: {VARIABLE} names a Python that has amd-aiter=={VERSION}")

#: The module that AITER builds first of all. It reads the members from the docstrings that pybind11 would have made.
ENUMS = '''
from enum import IntEnum


class ActivationType(IntEnum):
    """Members: No Silu Gelu"""

    No = -1
    Silu = 0
    Gelu = 1


class QuantType(IntEnum):
    """Members: No per_Tensor per_Token per_1x32 per_1x128 per_128x128"""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
'''


def without_rocm(folder: Path) -> dict[str, str]:
    """The environment in which AITER imports on a machine without ROCm."""
    hipconfig = folder / "rocm" / "bin" / "hipconfig"
    hipconfig.parent.mkdir(parents=True)
    hipconfig.write_text("#!/bin/sh\necho 6.4.43482-0\n")
    hipconfig.chmod(0o755)
    jit = folder / "jit"
    jit.mkdir()
    (jit / "module_aiter_enum.py").write_text(textwrap.dedent(ENUMS))
    return {
        **os.environ,
        "ROCM_HOME": str(folder / "rocm"),
        "GPU_ARCHS": "gfx950",
        "AITER_JIT_DIR": str(jit),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def test_the_stand_in_for_rocm_is_what_aiter_asks_for(tmp_path: Path) -> None:
    environment = without_rocm(tmp_path)
    command = [str(Path(environment["ROCM_HOME"]) / "bin" / "hipconfig"), "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "6.4.43482-0\n"
    code = "import module_aiter_enum as e; print(e.ActivationType.__doc__, '|', e.QuantType.__doc__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=environment["AITER_JIT_DIR"], capture_output=True, text=True
    )
    assert re.fullmatch(r"Members:.*\| Members:.*\n", done.stdout), done.stderr


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found out with the wheel: importing it takes ten seconds."""
    command = [str(PYTHON), "-m", "op_tests.integration_aiter_wheel"]
    environment = without_rocm(tmp_path_factory.mktemp("aiter"))
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("CHECK "):
            found |= json.loads(line.removeprefix("CHECK "))
    print(json.dumps(found, indent=1))
    return found


@wheel
def test_it_is_the_wheel_and_its_old_signature(checks: dict[str, Any]) -> None:
    assert checks["file"] == ["aiter", "__init__.py"]
    assert checks["parameters"][-1] == "out"
    assert "q_descale" not in checks["parameters"]


@wheel
def test_export_makes_the_module_that_the_wheel_lacks(checks: dict[str, Any]) -> None:
    assert checks["export"] == ["export", "installed", VERSION, ["aiter.ops.flydsl"]]


@wheel
def test_dispatch_takes_calls_through_every_import_form(checks: dict[str, Any]) -> None:
    assert checks["taken"] == ["aiter", "aiter.ops.mha", "engine"]


@wheel
@pytest.mark.parametrize(
    "feature", ["dropout_p", "logits_soft_cap", "window_size", "alibi_slopes", "return_attn_probs", "causal"]
)
def test_features_reach_the_wheels_own_kernel(checks: dict[str, Any], feature: str) -> None:
    assert checks[f"back {feature}"] is True


@wheel
@pytest.mark.parametrize("feature", ["dropout_p", "alibi_slopes", "kv_block_descale", "sink_ptr", "sink_size"])
def test_what_the_wheel_does_not_know_is_refused_by_the_wheel(checks: dict[str, Any], feature: str) -> None:
    assert checks[f"refused by the wheel {feature}"] is True


@wheel
def test_uninstall_leaves_the_wheel_as_it_was(checks: dict[str, Any]) -> None:
    assert checks["uninstall"] is True


@wheel
@pytest.mark.parametrize(("lacking", "raised"), [("ROCM_HOME", "RuntimeError"), ("hipcc", "SystemExit")])
def test_where_the_wheel_fails_to_import_the_process_goes_on(tmp_path: Path, lacking: str, raised: str) -> None:
    """Without hipconfig it raises at once; with it, it wants to build the enums and ends the process where it can't."""
    code = """
from aiter_paged_fp8.integrations import aiter
print(status := aiter.install())
from aiter.ops.flydsl import flydsl_flash_attn_paged_prefill_func
assert status.shim and status.aiter == "unusable"
"""
    environment = without_rocm(tmp_path)
    if lacking == "hipcc":
        (Path(environment["AITER_JIT_DIR"]) / "module_aiter_enum.py").unlink()
    else:
        del environment[lacking]
    done = subprocess.run([str(PYTHON), "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert f"not aiter: importing aiter raised {raised}: " in done.stdout
