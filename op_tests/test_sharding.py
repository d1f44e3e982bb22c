"""The CI scripts: how test files are split into shards, how a shard is run, how the times are refreshed, and that the
workflow gives nothing of a pull request's text to a shell."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from op_tests.cases import fresh_seed

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / ".github" / "scripts"
TIMES = Path(".github/split-test-times/aiter.tsv")
DEFAULT = 15.0


def bash(script: str, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a repository; of the caller's variables, none that it reads."""
    inherited = {name: value for name, value in os.environ.items() if not re.match("SHARD_|AITER_TEST|PYTEST_", name)}
    # No plugins: loading them takes a pytest longer than all else that it does here.
    environment = {**inherited, "PYTHON": sys.executable, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    command = ["bash", str(SCRIPTS / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def repository(folder: Path, files: dict[str, float | None], rows: str | None = None) -> Path:
    """A repository with test files and their times; None for a file without one."""
    (folder / "op_tests").mkdir(exist_ok=True)
    for name in files:
        (folder / "op_tests" / name).write_text("def test_nothing(): pass\n")
    (folder / TIMES).parent.mkdir(parents=True, exist_ok=True)
    if rows is None:
        rows = "".join(f"op_tests/{name}\t{time:g}\n" for name, time in files.items() if time is not None)
    (folder / TIMES).write_text(rows)
    return folder


def split(folder: Path, shards: int, *arguments: str) -> list[list[str]]:
    """The lists that the script writes."""
    done = bash("split_tests.sh", "--shards", str(shards), *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    texts = [(folder / f"aiter_shard_{shard}.list").read_text() for shard in range(shards)]
    assert all(text.endswith("\n") and text.count("\n") == 1 for text in texts), "one line each"
    assert len(list(folder.glob("*.list"))) == shards
    return [text.split() for text in texts]


def greedy(times: dict[str, float], shards: int) -> list[list[str]]:
    """What the issue says: longest first onto the least loaded shard, ties to the lowest index; names in bytes."""
    lists: list[list[str]] = [[] for _ in range(shards)]
    loads = [0.0] * shards
    for name in sorted(times, key=lambda name: (-times[name], name.encode())):
        least = loads.index(min(loads))
        lists[least].append(f"op_tests/{name}")
        loads[least] += times[name]
    return lists


# Splitting.


@pytest.mark.parametrize("shards", range(1, 21))
def test_this_suite_is_neither_lost_nor_doubled(shards: int, tmp_path: Path) -> None:
    every = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("op_tests/test_*.py"))
    done = bash("split_tests.sh", "--shards", str(shards), "--output-dir", str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lists = [(tmp_path / f"aiter_shard_{shard}.list").read_text().split() for shard in range(shards)]
    assert sorted(name for names in lists for name in names) == every
    times = dict.fromkeys(every, DEFAULT)
    for row in (ROOT / TIMES).read_text().splitlines():
        if not row.startswith("#"):
            name, value = row.split("\t")
            times[name] = float(value)
    loads = [sum(times[name] for name in names) for names in lists]
    longest, least = max(times.values()), sum(times.values()) / shards
    assert max(loads) <= max(longest, least) + longest


@pytest.mark.parametrize("count", [1, 2, 5, 25])
def test_longest_first_onto_the_least_loaded(tmp_path: Path, count: int) -> None:
    """Drawn times, with equal ones and some unknown, in an order of names that differs between locales."""
    generator = random.Random(fresh_seed())
    for shards in (1, 2, 3, 7, 20):
        folder = tmp_path / str(shards)
        folder.mkdir()
        names = [f"test_{first}{second}.py" for first in "aB_z0" for second in "Aa_-."]
        generator.shuffle(names)
        files = {name: generator.choice([None, 0, 0.5, 3, 3, 15, generator.randint(0, 999)]) for name in names[:count]}
        repository(folder, files)
        times = {name: DEFAULT if time is None else float(time) for name, time in files.items()}
        assert split(folder, shards) == greedy(times, shards)


def test_only_test_files_of_the_top_folder(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"test_a.py": 1, "test_b.py": 2})
    for name in ("cases.py", "test_notes.txt", "sub/test_c.py", "triton_tests/test_d.py"):
        (folder / "op_tests" / name).parent.mkdir(exist_ok=True)
        (folder / "op_tests" / name).write_text("")
    assert split(folder, 1) == [["op_tests/test_b.py", "op_tests/test_a.py"]]


def test_a_repository_without_times(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"test_a.py": None, "test_b.py": None, "test_c.py": None})
    (folder / TIMES).unlink()
    assert split(folder, 2, "-v") == [["op_tests/test_a.py", "op_tests/test_c.py"], ["op_tests/test_b.py"]]


def test_comments_blank_lines_and_no_newline_at_the_end(tmp_path: Path) -> None:
    rows = (
        "# path\tseconds\n\n  \n\t\nop_tests/test_b.py\t20.5\n#op_tests/test_b.py\t1\n  # more\nop_tests/test_a.py\t007"
    )
    folder = repository(tmp_path, {"test_a.py": None, "test_b.py": None}, rows)
    done = bash("split_tests.sh", "--shards", "1", "--dry-run", cwd=folder)
    assert "27.500 s" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "row",
    [
        "op_tests/test_a.py 5",
        "op_tests/test_a.py",
        "op_tests/test_a.py\t",
        "op_tests/test_a.py\t5\t",
        "op_tests/test_a.py\t-5",
        "op_tests/test_a.py\t5s",
        "op_tests/test_a.py\t1e3",
        "op_tests/test_a.py\t.5",
        "op_tests/test_a.py\t5\r",
        " op_tests/test_a.py\t5",
        "\t5",
        "@\t5",
        "op_tests/test_gone.py\t5",
        "op_tests/cases.py\t5",
        "test_a.py\t5",
        "op_tests/test_b.py\t5",
    ],
)
def test_a_bad_row_is_an_error_with_its_line(tmp_path: Path, row: str) -> None:
    """Malformed, of a file that is none of the tests, or the second one of a file."""
    folder = repository(tmp_path, {"test_a.py": None, "test_b.py": None}, f"# times\nop_tests/test_b.py\t3\n{row}\n")
    (folder / "op_tests" / "cases.py").write_text("")
    done = bash("split_tests.sh", "--shards", "2", cwd=folder)
    assert done.returncode == 1
    assert f"{TIMES}:3: got '" in done.stderr
    assert "accepted:" in done.stderr
    assert list(folder.glob("*.list")) == []


def test_a_selection(tmp_path: Path) -> None:
    folder = repository(tmp_path, {f"test_{name}.py": 4 for name in "abcd"})
    chosen = folder / "chosen"
    chosen.write_text("op_tests/test_d.py op_tests/test_a.py\n\n op_tests/test_d.py\top_tests/test_b.py")
    assert split(folder, 2, "--select-file", "chosen") == [
        ["op_tests/test_a.py", "op_tests/test_d.py"],
        ["op_tests/test_b.py"],
    ]
    for nothing in ("", "\n \n"):
        chosen.write_text(nothing)
        assert split(folder, 3, "--select-file", str(chosen)) == [[], [], []]


@pytest.mark.parametrize("word", ["op_tests/test_gone.py", "test_a.py", "op_tests/*.py", "@", "op_tests/test_a.py,x"])
def test_a_selection_of_what_is_no_test_file(tmp_path: Path, word: str) -> None:
    folder = repository(tmp_path, {"test_a.py": 1})
    (folder / "chosen").write_text(f"op_tests/test_a.py {word}\n")
    done = bash("split_tests.sh", "--shards", "2", "--select-file", "chosen", cwd=folder)
    assert done.returncode == 1
    assert f"got '{word}'" in done.stderr
    assert list(folder.glob("*.list")) == []


def test_a_dry_run_writes_nothing_and_a_run_removes_what_is_stale(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"test_a.py": 1, "test_b.py": 2, "test_c.py": 3})
    done = bash("split_tests.sh", "--shards", "3", "--test-type", "aiter", "--dry-run", "--verbose", cwd=folder)
    assert done.returncode == 0
    assert "op_tests/test_c.py" in done.stdout
    assert list(folder.glob("*.list")) == []
    assert len(split(folder, 3)) == 3
    assert len(split(folder, 2)) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--shards: got ''"),
        (["--shards"], "--shards: got nothing"),
        (["--shards", "0"], "--shards: got '0'"),
        (["--shards", "-1"], "--shards: got '-1'"),
        (["--shards", "2x"], "--shards: got '2x'"),
        (["--shards", "2", "--test-type", "triton"], "--test-type: got 'triton'"),
        (["--shards", "2", "--select-file", "nowhere"], "--select-file: got 'nowhere'"),
        (["--shards", "2", "--output-dir", "nowhere"], "--output-dir: got 'nowhere'"),
        (["--shards", "2", "op_tests"], "got argument 'op_tests'"),
    ],
)
def test_wrong_arguments_are_errors(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = bash("split_tests.sh", *arguments, cwd=repository(tmp_path, {"test_a.py": 1}))
    assert done.returncode == 1
    assert words in done.stderr
    assert "accepted:" in done.stderr


def test_names_that_a_list_cant_hold_are_refused(tmp_path: Path) -> None:
    for name in ("test_a b.py", "test_$(id).py"):
        folder = tmp_path / name
        folder.mkdir()
        done = bash("split_tests.sh", "--shards", "1", cwd=repository(folder, {name: None}))
        assert done.returncode == 1
        assert name in done.stderr


# Running.

SUITE = {
    "test_pass.py": "import pytest\n@pytest.mark.parametrize('i', range(3))\ndef test_it(i): pass",
    "test_main.py": "def test_it(): pass\nif __name__ == '__main__': raise SystemExit('python ran the file')",
    "test_some_skipped.py": "import pytest\ndef test_it(): pass\ndef test_no(): pytest.skip('no')",
}
BAD = {
    "test_fail.py": ("def test_it(): assert False\ndef test_other(): pass", "pytest exited with 1"),
    "test_none.py": ("print('no test here')", "ran no test, found none"),
    "test_skipped.py": ("import pytest\ndef test_it(): pytest.skip('no')", "ran no test, 1 skipped"),
    "test_broken.py": ("import nothing_of_this_name", "pytest exited with 2"),
    "test_slow.py": ("import time\ndef test_it(): time.sleep(60)", "its time was up after 4s"),
}


def suite(folder: Path, files: dict[str, str]) -> Path:
    repository(folder, dict.fromkeys(files))
    for name, text in files.items():
        (folder / "op_tests" / name).write_text(text + "\n")
    return folder


def totals(text: str) -> tuple[int, int, int]:
    """passed, failed and skipped of a shard, from its last lines."""
    passed, failed, skipped = re.findall(r"Shard \d+ of \d+: (\d+) passed, (\d+) failed, (\d+) skipped", text)[-1]
    return int(passed), int(failed), int(skipped)


def test_shards_run_what_one_pytest_runs(tmp_path: Path) -> None:
    folder = suite(tmp_path, SUITE)
    done = [bash("aiter_test.sh", cwd=folder, SHARD_TOTAL="3", SHARD_IDX=str(shard)) for shard in range(3)]
    assert [run.returncode for run in done] == [0, 0, 0], done
    sums = [sum(numbers) for numbers in zip(*(totals(run.stdout) for run in done), strict=True)]
    plain = subprocess.run([sys.executable, "-m", "pytest", "op_tests"], cwd=folder, capture_output=True, text=True)
    assert "5 passed, 1 skipped" in plain.stdout
    assert sums == [5, 0, 1]
    log = (folder / "latest_test.log").read_text()
    for name in SUITE:
        assert len(re.findall(f"Time elapsed of op_tests/{name}: ", log)) == 1, "each file ran in one shard"


def test_each_way_to_fail_is_named_and_the_rest_is_run(tmp_path: Path) -> None:
    folder = suite(tmp_path, {**{name: text for name, (text, _) in BAD.items()}, **SUITE})
    files = [f"op_tests/{name}" for name in (*BAD, *SUITE)]
    done = bash(
        "aiter_test.sh", cwd=folder, AITER_TEST=" ".join(files), AITER_TEST_TIMEOUT="4s", AITER_TEST_JUNIT="junit/deep"
    )
    assert done.returncode == 1
    listed = done.stdout[done.stdout.index("Failed test files:") :].splitlines()[1:]
    assert listed == [f"  op_tests/{name}: {reason}" for name, (_, reason) in BAD.items()]
    assert totals(done.stdout) == (6, 2, 2)
    assert (folder / "latest_test.log").read_text() == done.stdout
    assert {path.stem for path in (folder / "junit" / "deep").iterdir()} >= {Path(name).stem for name in SUITE}


@pytest.mark.parametrize("name", BAD)
def test_one_bad_file_fails_the_shard(tmp_path: Path, name: str) -> None:
    folder = suite(tmp_path, {name: BAD[name][0]})
    done = bash("aiter_test.sh", cwd=folder, SHARD_TOTAL="1", AITER_TEST_TIMEOUT="4s")
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize("word", ["op_tests/test_gone.py", "op_tests/test_*.py", "op_tests", "$(id)"])
def test_what_is_no_file_fails_and_is_not_expanded(tmp_path: Path, word: str) -> None:
    folder = suite(tmp_path, SUITE)
    done = bash("aiter_test.sh", cwd=folder, AITER_TEST=f"{word}\n op_tests/test_main.py")
    assert done.returncode == 1
    assert f"  {word}: no such file" in done.stdout.splitlines()
    assert totals(done.stdout) == (1, 0, 0)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SHARD_TOTAL": "0"}, "SHARD_TOTAL: got '0'"),
        ({"SHARD_TOTAL": "3", "SHARD_IDX": "3"}, "SHARD_IDX: got '3'; accepted: 0 to 2"),
        ({"SHARD_IDX": "-1"}, "SHARD_IDX: got '-1'"),
        ({"SHARD_IDX": "08"}, "SHARD_IDX: got '08'"),
    ],
)
def test_a_shard_that_is_none_is_an_error(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    """It would run nothing and pass."""
    done = bash("aiter_test.sh", cwd=suite(tmp_path, SUITE), **variables)
    assert done.returncode == 1
    assert words in done.stderr


def test_more_shards_than_files(tmp_path: Path) -> None:
    folder = suite(tmp_path, SUITE)
    done = bash("aiter_test.sh", cwd=folder, SHARD_TOTAL="9", SHARD_IDX="8")
    assert done.returncode == 0, done.stderr
    assert totals(done.stdout) == (0, 0, 0)


# Times.


def refresh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "refresh_times.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_times_come_from_junit_files(tmp_path: Path) -> None:
    """Of one run for all and of one run a file; what is not mentioned is kept, what is gone is dropped."""
    folder = repository(tmp_path, {"test_a.py": 3, "test_b.py": None, "test_kept.py": 8, "test_new.py": None})
    (folder / TIMES).write_text((folder / TIMES).read_text() + "op_tests/test_gone.py\t9\n")
    (folder / "all.xml").write_text("""<?xml version="1.0"?><testsuites><testsuite tests="4" time="99.5">
<testcase classname="op_tests.test_a" name="one" time="20.25"/>
<testcase classname="op_tests.test_a.TestClass" name="two" time="3.5"/>
<testcase classname="op_tests.test_b" name="three" time="0.001"/>
<testcase classname="elsewhere.test_b" name="four" time="50"/>
</testsuite></testsuites>""")
    done = refresh(folder, "all.xml")
    assert done.returncode == 0, done.stderr
    rows = [row for row in (folder / TIMES).read_text().splitlines() if not row.startswith("#")]
    assert rows == ["op_tests/test_a.py\t24", "op_tests/test_b.py\t1", "op_tests/test_kept.py\t8"]
    assert "2 refreshed, 1 kept, 1 without a time" in done.stdout
    (folder / "one").mkdir()
    (folder / "one" / "test_b.xml").write_text(
        '<testsuites><testsuite time="7.2"><testcase classname="op_tests.test_b" time="0.1"/></testsuite></testsuites>'
    )
    assert refresh(folder, "one").returncode == 0
    assert "op_tests/test_b.py\t8\n" in (folder / TIMES).read_text(), "with what its imports take"
    assert len(split(folder, 2)) == 2, "split_tests.sh takes what refresh_times.py writes"


def test_times_of_a_real_run(tmp_path: Path) -> None:
    folder = suite(tmp_path, SUITE)
    assert bash("aiter_test.sh", cwd=folder, SHARD_TOTAL="1", AITER_TEST_JUNIT="junit").returncode == 0
    assert refresh(folder, "junit").returncode == 0
    rows = [row.split("\t") for row in (folder / TIMES).read_text().splitlines() if not row.startswith("#")]
    assert [name for name, _ in rows] == [f"op_tests/{name}" for name in sorted(SUITE)]
    assert all(1 <= int(seconds) < 60 for _, seconds in rows)


def test_a_broken_junit_file_changes_nothing(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"test_a.py": 3})
    (folder / "cut.xml").write_text("<testsuites><testsuite>")
    before = (folder / TIMES).read_text()
    for path in ("cut.xml", "nowhere.xml"):
        assert refresh(folder, path).returncode == 1
        assert (folder / TIMES).read_text() == before


# Scripts and workflows as texts.


def shell_scripts() -> list[Path]:
    return sorted([*SCRIPTS.glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: path.name)
def test_shell_scripts_parse_and_pass_shellcheck(script: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert shellcheck, "shellcheck is missing: pip install -r requirements.txt"
    for command in (["bash", "-n"], [shellcheck]):
        done = subprocess.run([*command, str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.name)
def test_workflows_have_no_rights_and_no_foreign_text_in_a_shell(path: Path) -> None:
    workflow = load(path)
    events = workflow[True]  # YAML reads the key `on` so
    assert "pull_request_target" not in path.read_text().replace("never pull_request_target", "")
    assert "pull_request" in events
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), "an expression in a script is text that the shell executes"
            assert "github.event" not in str(step)
            assert "secrets" not in str(step)
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_the_workflow_runs_every_shard_that_it_makes() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "op-tests.yml")["jobs"]
    (made,) = [step["run"] for step in jobs["split"]["steps"] if "split_tests.sh" in step.get("run", "")]
    count = int(re.findall(r"--shards (\d+)", made)[0])
    assert set(jobs) == {"split", "cpu", "gfx950"}
    for name in ("cpu", "gfx950"):
        assert jobs[name]["strategy"]["matrix"]["shard"] == list(range(count))
        assert jobs[name]["env"]["SHARD_TOTAL"] == count
        (step,) = [step for step in jobs[name]["steps"] if "aiter_test.sh" in step.get("run", "")]
        assert step["env"]["PYTHON"] == ".venv/bin/python"
    assert jobs["gfx950"]["runs-on"] == ["self-hosted", "gfx950"]
    assert jobs["gfx950"]["if"].startswith("vars.GFX950_RUNNER == 'true' &&")
