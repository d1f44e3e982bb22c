"""Refreshes the running times by which split_tests.sh balances its shards, from junit files.

    python .github/scripts/refresh_times.py [--times FILE] [--root FOLDER] JUNIT...

JUNIT is a junit file of pytest or a folder of them: one file for the whole suite, or one for each test file, as
aiter_test.sh keeps them in AITER_TEST_JUNIT. Test files that they do not mention keep their row; files that are gone
lose it. Standard library only, so that it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import math
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

HEADER = """\
# Running time of each test file in seconds, one core, for split_tests.sh. Made by refresh_times.py from junit files.
"""


def junit_files(paths: Iterable[Path]) -> list[Path]:
    """The junit files at these paths, folders searched; ValueError for a path that is neither."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(path.rglob("*.xml"))
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"JUNIT: got {path}; accepted: a junit file or a folder of them")
    return found


def file_of(classname: str, known: set[str]) -> str | None:
    """``op_tests.test_plan.TestClass`` to ``op_tests/test_plan.py``; None for what is no test file."""
    parts = classname.split(".")
    for count in range(len(parts), 0, -1):
        name = "/".join(parts[:count]) + ".py"
        if name in known:
            return name
    return None


def measured(junit: Path, known: set[str]) -> dict[str, float]:
    """Seconds of each test file in one junit file.

    Where a suite holds one file only, the suite's own time counts: it has imports and collection, too.
    """
    seconds: dict[str, float] = defaultdict(float)
    for suite in ElementTree.parse(junit).iter("testsuite"):
        own: dict[str, float] = defaultdict(float)
        for case in suite.iter("testcase"):
            name = file_of(case.get("classname", ""), known)
            if name is not None:
                own[name] += float(case.get("time", 0))
        if len(own) == 1:
            (name,) = own
            own[name] = max(own[name], float(suite.get("time", 0)))
        for name, time in own.items():
            seconds[name] += time
    return seconds


def rows_of(times: Path, known: set[str]) -> dict[str, str]:
    """The rows there are, of files that still exist."""
    rows: dict[str, str] = {}
    for line in times.read_text().splitlines() if times.exists() else []:
        name, tab, value = line.partition("\t")
        if tab and name in known:
            rows[name] = value
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, merge, write. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Refresh the running times of split_tests.sh from junit files.")
    parser.add_argument("junit", nargs="+", type=Path, help="junit files, or folders of them")
    parser.add_argument("--root", type=Path, default=Path(), help="root of the repository (default: here)")
    parser.add_argument("--times", type=Path, help="default: .github/split-test-times/aiter.tsv in the root")
    options = parser.parse_args(arguments)
    root: Path = options.root
    times: Path = options.times or root / ".github" / "split-test-times" / "aiter.tsv"
    known = {path.relative_to(root).as_posix() for path in root.glob("op_tests/test_*.py")}
    rows = rows_of(times, known)
    seconds: dict[str, float] = {}
    try:
        for junit in junit_files(options.junit):
            seconds |= measured(junit, known)
    except (ValueError, ElementTree.ParseError) as error:
        print(f"refresh_times.py: {error}", file=sys.stderr)
        return 1
    # Whole seconds, at least 1: a file costs the start of an interpreter, whatever its tests take.
    rows |= {name: str(max(1, math.ceil(time))) for name, time in seconds.items()}
    times.parent.mkdir(parents=True, exist_ok=True)
    times.write_text(HEADER + "".join(f"{name}\t{value}\n" for name, value in sorted(rows.items())))
    missing = sorted(known - rows.keys())
    print(f"{times}: {len(seconds)} refreshed, {len(rows) - len(seconds)} kept, {len(missing)} without a time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
