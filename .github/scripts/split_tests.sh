#!/usr/bin/env bash
# Splits the test files of op_tests/ into shards of about the same running time.
#
#   bash .github/scripts/split_tests.sh --shards N [--test-type aiter] [--select-file F] [--output-dir D] [--dry-run] [-v]
#
#   --shards N        number of shards, 1 or more
#   --test-type T     aiter: op_tests/test_*.py, not those of sub-folders
#   --select-file F   only the files that F names, separated by white space
#   --output-dir D    where the lists go (default: the current folder)
#   --dry-run         print the plan, write nothing
#   -v, --verbose     print also which files have no time yet
#
# Writes aiter_shard_K.list for K = 0 .. N-1: one line, file names separated by spaces, longest first. Times come from
# .github/split-test-times/aiter.tsv (path<TAB>seconds; blank lines and lines with # are skipped). The longest file goes
# first, each onto the shard with the least so far, the lowest number of several. Runs in the root of the repository.
set -euo pipefail

DEFAULT_SECONDS=15

fail() {
    echo "split_tests.sh: $*" >&2
    exit 1
}

shards="" test_type="aiter" select_file="" output_dir="." dry_run=0 verbose=0
while [[ $# -gt 0 ]]; do
    case "$1" in
        --shards | --test-type | --select-file | --output-dir)
            [[ $# -ge 2 ]] || fail "$1: got nothing; accepted: a value"
            case "$1" in
                --shards) shards="$2" ;;
                --test-type) test_type="$2" ;;
                --select-file) select_file="$2" ;;
                --output-dir) output_dir="$2" ;;
            esac
            shift 2
            ;;
        --dry-run) dry_run=1; shift ;;
        -v | --verbose) verbose=1; shift ;;
        *) fail "got argument '$1'; accepted: --shards, --test-type, --select-file, --output-dir, --dry-run, -v" ;;
    esac
done
[[ "$shards" =~ ^[1-9][0-9]{0,3}$ ]] || fail "--shards: got '$shards'; accepted: a number of 1 or more"
[[ "$test_type" == "aiter" ]] || fail "--test-type: got '$test_type'; accepted: aiter"
[[ -d op_tests ]] || fail "no folder op_tests in $PWD; accepted: the root of the repository"
[[ -d "$output_dir" ]] || fail "--output-dir: got '$output_dir'; accepted: a folder"

name_form='[A-Za-z0-9_./-]+'
# Every test file, in the order of the C locale whatever that of the caller.
mapfile -t files < <(find op_tests -maxdepth 1 -type f -name 'test_*.py' | LC_ALL=C sort)
[[ ${#files[@]} -gt 0 ]] || fail "no op_tests/test_*.py in $PWD"
declare -A milliseconds=()
for file in "${files[@]}"; do
    # A list is one line separated by spaces, and CI hands it on in a variable.
    [[ "$file" =~ ^$name_form$ ]] || fail "got a test file '$file'; accepted: letters, digits, _ . - in its name"
    milliseconds[$file]=""
done

# Times. A row that means nothing would silently spoil the balance, so that each is an error.
times=".github/split-test-times/$test_type.tsv"
row_form="^($name_form)"$'\t([0-9]{1,9})(\\.[0-9]+)?$'
number=0
if [[ -f "$times" ]]; then
    while IFS= read -r row || [[ -n "$row" ]]; do
        number=$((number + 1))
        [[ "$row" =~ ^[[:space:]]*(#|$) ]] && continue
        [[ "$row" =~ $row_form ]] ||
            fail "$times:$number: got '$row'; accepted: path<TAB>seconds"
        file="${BASH_REMATCH[1]}" seconds="${BASH_REMATCH[2]}" fraction="${BASH_REMATCH[3]:-.}000"
        [[ -n "${milliseconds[$file]+known}" ]] || fail "$times:$number: got '$file'; accepted: a file op_tests/test_*.py"
        [[ -z "${milliseconds[$file]}" ]] || fail "$times:$number: got '$file' for the second time; accepted: a row a file"
        milliseconds[$file]=$((10#$seconds * 1000 + 10#${fraction:1:3}))
    done < "$times"
fi
unknown=()
for file in "${files[@]}"; do
    if [[ -z "${milliseconds[$file]}" ]]; then
        unknown+=("$file")
        milliseconds[$file]=$((DEFAULT_SECONDS * 1000))
    fi
done

# The selection: whatever its order and repetitions, each file at most once and in the order of all.
if [[ -n "$select_file" ]]; then
    [[ -f "$select_file" ]] || fail "--select-file: got '$select_file'; accepted: a file with names of test files"
    declare -A selected=()
    while read -r -a words || [[ ${#words[@]} -gt 0 ]]; do
        for file in "${words[@]}"; do
            [[ "$file" =~ ^$name_form$ && -n "${milliseconds[$file]+known}" ]] ||
                fail "--select-file $select_file: got '$file'; accepted: files op_tests/test_*.py that exist"
            selected[$file]=1
        done
        words=()
    done < "$select_file"
    kept=()
    for file in "${files[@]}"; do
        [[ -n "${selected[$file]+chosen}" ]] && kept+=("$file")
    done
    files=("${kept[@]+"${kept[@]}"}")
fi

loads=() lists=()
for ((shard = 0; shard < shards; shard++)); do
    loads[shard]=0
    lists[shard]=""
done
while read -r time file; do
    [[ -n "$file" ]] || continue
    least=0
    for ((shard = 1; shard < shards; shard++)); do
        ((loads[shard] < loads[least])) && least=$shard
    done
    loads[least]=$((loads[least] + time))
    lists[least]+="${lists[least]:+ }$file"
done < <(
    for file in "${files[@]+"${files[@]}"}"; do
        echo "${milliseconds[$file]} $file"
    done | LC_ALL=C sort -k1,1nr -k2,2
)

seconds() {
    printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000))
}

echo "$test_type: ${#files[@]} files in $shards shards"
for ((shard = 0; shard < shards; shard++)); do
    read -r -a members <<< "${lists[shard]}"
    echo "Shard $shard: ${#members[@]} files, about $(seconds "${loads[shard]}") s"
    for file in "${members[@]+"${members[@]}"}"; do
        printf '  [%9s s] %s\n' "$(seconds "${milliseconds[$file]}")" "$file"
    done
done
if ((verbose)); then
    for file in "${unknown[@]+"${unknown[@]}"}"; do
        echo "no time yet, $DEFAULT_SECONDS s taken: $file"
    done
fi
((dry_run)) && exit 0

# A list that an earlier split into more shards has left would run its files twice.
rm -f -- "$output_dir/${test_type}"_shard_*.list
for ((shard = 0; shard < shards; shard++)); do
    echo "${lists[shard]}" > "$output_dir/${test_type}_shard_$shard.list"
done
