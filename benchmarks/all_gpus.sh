#!/usr/bin/env bash
# Tests and figures on all GPUs of this machine, each command from empty caches, under its own limit, with its full output kept.
#
#   benchmarks/all_gpus.sh FOLDER [PART...]
#
# PARTS, all if none is named: tests; tests-steps (those of distributed steps); steps (each distributed step of kernels/, checked and timed);
# ag-gemm (216 configs beside an exhaustive search); vanilla (the same beside triton.autotune, minutes); split (a tuning script on all GPUs, on
# one, and with one rank killed); attention (a layer of a public library, fla-core). FOLDER gets a file for each command, rank 0's logs, and
# summary.txt: exit status, seconds and command. Without a GPU all run small, under Triton's interpreter, to try this script: what needs a GPU
# says so.
set -uo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    [[ ${1:-} == -h || ${1:-} == --help ]]
    exit $((2 * $?))
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit
shift
(($#)) || set -- tests tests-steps steps ag-gemm vanilla split attention
for part; do
    case $part in
        tests | tests-steps | steps | ag-gemm | vanilla | split | attention) ;;
        *) echo "${0##*/}: no part $part: tests, tests-steps, steps, ag-gemm, vanilla, split, attention" >&2; exit 2 ;;
    esac
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) && cd "$root" || exit
python=python3
if [[ -x .venv/bin/python ]]; then python=$root/.venv/bin/python; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
n_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit
launch=("$root/launch/launch.sh")
if ((n_gpus == 0)); then export TRITON_INTERPRET=1; fi

# run NAME LIMIT COMMAND...: in a folder and with caches of its own; output in NAME.txt, a line in summary.txt.
run() {
    local name=$1 limit=$2 began=$SECONDS status work shown
    shift 2
    work=$(mktemp -d) shown=$(tr -s '\n ' ' ' <<<"${*//"$root/"/}")
    echo "$ $shown" >"$out/$name.txt"
    (cd "$work" && TRITON_CACHE_DIR=$work/triton DIST_TUNE_CACHE_DIR=$work/records timeout --kill-after=10 "$limit" "$@") >>"$out/$name.txt" 2>&1
    status=$?
    printf '%s: exit %d, %d s: %s\n' "$name" "$status" $((SECONDS - began)) "$shown" | tee -a "$out/summary.txt"
    if [[ -f $work/.autotune_logs/rank-0.log ]]; then cp "$work/.autotune_logs/rank-0.log" "$out/$name-rank-0.log"; fi
    rm -rf "$work"
}

tests() {
    run tests 240 "$python" -m pytest -v -m gpu "$root/tests/gpu" --durations=0 -p no:cacheprovider \
        --ignore="$root/tests/gpu/test_steps.py"
}

tests-steps() {
    run tests-moe 280 "$python" -m pytest -v -m gpu "$root/tests/gpu/test_steps.py" -k moe --durations=0 -p no:cacheprovider
    run tests-row-parallel 390 "$python" -m pytest -v -m gpu "$root/tests/gpu/test_steps.py" -k gemm --durations=0 -p no:cacheprovider
}

steps() {
    local step case
    for step in ag_gemm gemm_rs gemm_allreduce ag_moe moe_reduce_rs; do
        for case in check perf; do run "${step//_/-}-$case" 200 "${launch[@]}" "$root/kernels/$step.py" --case $case; done
    done
}

ag-gemm() {
    run ag-gemm-216 280 "${launch[@]}" "$root/benchmarks/bench_tuning.py" --tuners exhaustive,racing --json "$out/ag-gemm-216.json"
}

vanilla() {
    local shape=(--shape 4096,11008,4096)
    if ((n_gpus == 0)); then shape=(); fi
    run ag-gemm-vanilla 290 "${launch[@]}" "$root/benchmarks/bench_tuning.py" --tuners vanilla,racing --cold-repeats 1 --disk-repeats 0 --repeats 1 "${shape[@]}"
}

split() {
    local script=$root/launch/tune_a8w8_blockscale.py options=(--max-configs 400) kill_after=20
    if ((n_gpus == 0)); then options=(--m 32 64 --n 128 --k 128 --space small --max-configs 3); kill_after=6; fi
    run split-all 200 "${launch[@]}" "$script" --save-path "$out/split-all" "${options[@]}"
    run split-one 290 env CUDA_VISIBLE_DEVICES=0 "$python" "$script" --save-path "$out/split-one" "${options[@]}"
    run split-winners 10 diff -r -y -W 200 --suppress-common-lines "$out/split-all" "$out/split-one"
    run split-killed 200 bash -c '
        export MASTER_ADDR=127.0.0.1 MASTER_PORT=29555 WORLD_SIZE=$1 DIST_TUNE_DEADLINE_S=10
        for ((rank = $1 - 1; rank >= 0; rank--)); do RANK=$rank LOCAL_RANK=$rank "${@:3}" & ranks[rank]=$!; done
        sleep "$2"; kill -9 "${ranks[$1 - 1]}"; echo "rank $(($1 - 1)) killed after $2 s"
        wait "${ranks[0]}"' killed "$((n_gpus > 0 ? n_gpus : 2))" "$kill_after" "$python" "$script" --save-path "$out/split-killed" "${options[@]}"
}

attention() {
    run attention-check 100 "${launch[@]}" "$root/examples/linear_attention.py" --case check
    run attention-perf 200 "${launch[@]}" "$root/examples/linear_attention.py" --case perf --vanilla compiled
}

{
    echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(OMP_NUM_THREADS= nproc) cores"
    "$python" -c 'import sys, torch, triton; print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)'
    if ((n_gpus > 0)); then nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader; fi
} | tee -a "$out/summary.txt"
for part; do "$part"; done
