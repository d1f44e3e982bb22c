"""What a new user tries first: the README's example, the demo, the doctor, the wheel's metadata."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, timeout=300)


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
