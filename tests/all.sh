#!/usr/bin/env bash
# All tests, as `make test` runs them. Three runs side by side, because tests of ranks wait: those; those that another Triton
# decides, and then a part of the others; and the rest. What the runs in the background print comes at their end; the last
# line says what was skipped.
#
#   tests/all.sh [FOLDER]     FOLDER gets the other Triton, which stands before the installed one on PYTHONPATH
set -uo pipefail
if [[ ${1:-} == -* ]]; then  # the help is the comment above
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    [[ $1 == -h || $1 == --help ]]
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
of_ranks=(tests/ranks tests/faults)
of_triton=(
    tests/compiler tests/launches tests/test_configs.py tests/test_pruning.py
    tests/ranks/test_compiled.py tests/ranks/test_hooks.py tests/ranks/test_libraries.py tests/ranks/test_variants.py
)
part=(benchmarks/tests tests/records tests/cli tests/examples tests/kernels tests/measure tests/offline tests/report tests/search)
logs=$(mktemp -d) runs=() code=0
trap 'rm -rf "$logs"' EXIT

run() { .venv/bin/python -m pytest "${@:2}" >"$logs/$1" 2>&1; }

run ranks "${of_ranks[@]}" & runs+=($!)
{
    of_newer=0
    if (($#)); then
        MAKEFLAGS='' make --silent "$1/triton/__init__.py" || exit 1
        PYTHONPATH=$1${PYTHONPATH:+:$PYTHONPATH} run newer -m "not gpu and not slow and not once" "${of_triton[@]}" || of_newer=1
    fi
    run part "${part[@]}" && exit $of_newer
} & runs+=($!)
others=("${of_ranks[@]}" "${part[@]}")
.venv/bin/python -m pytest tests "${others[@]/#/--ignore=}" | tee "$logs/others" || code=1
for each in "${runs[@]}"; do wait "$each" || code=1; done
for each in "$logs"/{ranks,newer,part}; do [[ ! -e $each ]] || cat "$each"; done
skipped=$(sed -n 's/^SKIPPED \[\([0-9]*\)\] \([^:]*\):[0-9]*: \(.*\)/\1 of \2 (\3)/p' "$logs"/* | sort -u | paste -sd ';')
echo "skipped: ${skipped:-nothing}"
exit $code
