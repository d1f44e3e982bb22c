#!/usr/bin/env bash
# Runs test files one by one under pytest, each with a time limit. By environment variables:
#
#   AITER_TEST           the files, separated by white space, as in a list of split_tests.sh; empty or unset: a shard of
#                        all op_tests/test_*.py, as split_tests.sh gives it
#   SHARD_TOTAL          number of shards (default 5)
#   SHARD_IDX            this one's, from 0 (default 0)
#   AITER_TEST_TIMEOUT   limit of a file, for timeout(1) (default 60m)
#   AITER_TEST_JUNIT     folder for a junit file of each test file, which refresh_times.py reads (default: none is kept)
#   PYTHON               the interpreter (default python3)
#
# Everything is printed and appended to latest_test.log. A file fails when pytest fails, when its time is up, and when
# it ran no test: found none, or skipped all of them. Exits with 1 when any file failed, after running all of them.
# Runs in the root of the repository.
set -euo pipefail

SHARD_TOTAL="${SHARD_TOTAL:-5}"
SHARD_IDX="${SHARD_IDX:-0}"
PYTHON="${PYTHON:-python3}"
LIMIT="${AITER_TEST_TIMEOUT:-60m}"
LOG="latest_test.log"
HERE="$(dirname "${BASH_SOURCE[0]}")"

fail() {
    echo "aiter_test.sh: $*" >&2
    exit 1
}

say() {
    echo "$@" | tee -a "$LOG"
}

[[ "$SHARD_TOTAL" =~ ^[1-9][0-9]{0,3}$ ]] || fail "SHARD_TOTAL: got '$SHARD_TOTAL'; accepted: a number of 1 or more"
[[ "$SHARD_IDX" =~ ^(0|[1-9][0-9]{0,3})$ && "$SHARD_IDX" -lt "$SHARD_TOTAL" ]] ||
    fail "SHARD_IDX: got '$SHARD_IDX'; accepted: 0 to $((SHARD_TOTAL - 1))"

scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
junit="$scratch"
if [[ -n "${AITER_TEST_JUNIT:-}" ]]; then
    mkdir -p "$AITER_TEST_JUNIT"
    junit="$AITER_TEST_JUNIT"
fi

given="${AITER_TEST:-}"
if [[ -z "${given//[[:space:]]/}" ]]; then
    bash "$HERE/split_tests.sh" --shards "$SHARD_TOTAL" --output-dir "$scratch" > "$scratch/plan"
    given="$(cat "$scratch/aiter_shard_$SHARD_IDX.list")"
fi
# Words, and no patterns: a list is not expanded by the shell.
read -r -a files <<< "$(tr -s '[:space:]' ' ' <<< "$given")"
say "Shard $SHARD_IDX of $SHARD_TOTAL: ${#files[@]} files, at most $LIMIT each."

# Outcome of a file: "passed failed skipped", from its junit file.
count() {
    "$PYTHON" - "$1" <<'PY'
import sys
import xml.etree.ElementTree as ElementTree

tests = failed = skipped = 0
for suite in ElementTree.parse(sys.argv[1]).iter("testsuite"):
    tests += int(suite.get("tests", 0))
    failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped += int(suite.get("skipped", 0))
print(max(tests - failed - skipped, 0), failed, skipped)
PY
}

failed_files=()
all_passed=0 all_failed=0 all_skipped=0
for file in "${files[@]+"${files[@]}"}"; do
    say ""
    say "==== $file (shard $SHARD_IDX of $SHARD_TOTAL)"
    report="$junit/$(basename "$file" .py).xml"
    rm -f -- "$report"
    reason="" passed=0 failed=0 skipped=0
    started=$SECONDS
    if [[ ! -f "$file" ]]; then
        reason="no such file"
    else
        status=0
        timeout --kill-after=30s "$LIMIT" "$PYTHON" -m pytest "$file" --junitxml="$report" 2>&1 |
            tee -a "$LOG" || status=${PIPESTATUS[0]}
        if [[ -f "$report" ]]; then
            counts="$(count "$report")"
            read -r passed failed skipped <<< "$counts"
        fi
        case "$status" in
            0) [[ $((passed + failed)) -gt 0 ]] || reason="ran no test, $skipped skipped" ;;
            5) reason="ran no test, found none" ;;
            124) reason="its time was up after $LIMIT" ;;
            137) reason="it was killed: its time was up after $LIMIT and it did not end, or memory ran out" ;;
            *) reason="pytest exited with $status" ;;
        esac
    fi
    all_passed=$((all_passed + passed))
    all_failed=$((all_failed + failed))
    all_skipped=$((all_skipped + skipped))
    [[ -n "$reason" ]] && failed_files+=("$file: $reason")
    say "---- $file: ${reason:-passed}"
    # The form that AITER's own collector of times looks for in logs.
    say "Time elapsed of $file: $((SECONDS - started)) seconds"
done

say ""
say "Shard $SHARD_IDX of $SHARD_TOTAL: $all_passed passed, $all_failed failed, $all_skipped skipped"
if [[ ${#failed_files[@]} -gt 0 ]]; then
    say "Failed test files:"
    for file in "${failed_files[@]}"; do
        say "  $file"
    done
    exit 1
fi
say "All files of the shard passed."
