"""What a new user tries first: the README's example, the demo, the doctor, the wheel's metadata."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment
    )


def test_the_readme_example_prints_what_the_readme_says() -> None:
    text = (ROOT / "README.md").read_text()
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", text[text.index("## Example") :], re.S)[:2]
    result = _run("-c", code)
    assert result.returncode == 0, result.stderr
    # Numbers may differ in the last place between CPUs; everything else is exact.
    numbers = r"-?\d+\.\d+"
    assert re.sub(numbers, "#", result.stdout.strip()) == re.sub(numbers, "#", shown.strip())
    printed, expected = (list(map(float, re.findall(numbers, part))) for part in (result.stdout, shown))
    assert printed == pytest.approx(expected, rel=0.01)


def test_demo_shows_every_layout_and_both_tables_within_bounds() -> None:
    result = _run("-m", "aiter_paged_fp8", "demo", "--seed", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    for layout in ("linear 1 ", "linear 24", "vectorized 16", "vectorized 64", "vectorized 1024"):
        rows = [line for line in result.stdout.splitlines() if layout in line]
        assert len(rows) >= 2, (layout, result.stdout)
        assert any("block table" in row for row in rows)
        assert any("CSR" in row for row in rows)
    assert "why this path: arch" in result.stdout
    assert re.search(r"axpy_kernel_0: 16 waves executed \d+ wave-instructions", result.stdout)
    assert "undefined values: 0" in result.stdout


def test_demo_fails_when_a_result_is_out_of_bounds() -> None:
    wrong = "import aiter_paged_fp8.demo as d, sys; d.MAX_ERROR = 1e-9; sys.exit(d.demo())"
    assert _run("-c", wrong).returncode == 1


def test_doctor_says_what_would_run_and_why() -> None:
    result = _run("-m", "aiter_paged_fp8", "doctor")
    assert result.returncode == 0, result.stderr
    for words in ("aiter_paged_fp8", "torch", "FlyDSL", "AITER", "architecture", "cache directory", "gfx950", "dense"):
        assert words in result.stdout
    for executor in ("auto", "gpu", "emulator", "torch"):
        assert re.search(rf"^  {executor}: .+\(\w+: .+\)$", result.stdout, re.M), result.stdout


def test_an_unknown_command_is_refused() -> None:
    result = _run("-m", "aiter_paged_fp8", "nonsense")
    assert result.returncode == 2
    assert "demo" in result.stderr


def test_the_ten_line_kernel_of_the_readme_runs_in_the_emulator(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text[text.index("## Run your own FlyDSL kernel") :], re.S)[0]
    program = tmp_path / "ten_lines.py"  # FlyDSL reads a kernel's source from its file
    program.write_text(code)
    result = _run(str(program))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[:2] == ["True", "16"]
    assert result.stdout.strip().endswith("[]")


def test_inspect_prints_resources_and_executed_counts() -> None:
    result = _run("-m", "aiter_paged_fp8", "inspect", "--json")
    assert result.returncode == 0, result.stderr
    (kernel,) = json.loads(result.stdout)
    assert kernel["resources"]["target"].endswith("gfx950")
    assert kernel["resources"]["spills"] == 0
    assert kernel["executed"]["waves"] == 16
    assert kernel["executed"]["instructions"] == sum(kernel["executed"]["by_class"].values())
    # x is read, y is read and written: 1024 floats each.
    assert kernel["executed"]["bytes"]["global read"] == 2 * 4096
    assert kernel["executed"]["bytes"]["global written"] == 4096


def test_coverage_lists_what_is_implemented_and_tested() -> None:
    result = _run("-m", "aiter_paged_fp8", "inspect", "--isa-coverage")
    assert result.returncode == 0, result.stderr
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("v_mfma_f32_32x32x64_f8f6f4 ")]
    assert row[1:5] == ["matrix", "yes", "0", "yes"]


def test_inspect_names_what_the_emulator_lacks(tmp_path: Path) -> None:
    from aiter_paged_fp8.emulator import Program
    from op_tests.emulator_kernels import isa_text

    text = isa_text("\tv_no_such_thing_f32 v1, v2\n\ts_endpgm", 1)
    assert Program.parse(text).name == "kernel"
    path = tmp_path / "kernel.s"
    path.write_text(text)
    result = _run("-m", "aiter_paged_fp8", "inspect", str(path))
    assert result.returncode == 1
    assert "v_no_such_thing_f32" in result.stdout
    assert "line 3" in result.stdout
