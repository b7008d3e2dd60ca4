#!/usr/bin/env bash
# Tests and figures on all GPUs of this machine, each command under its own limit, with its full output kept, and from empty caches unless
# its name says "hit", "compiled" or "killed".
#
#   benchmarks/all_gpus.sh FOLDER [PART...]
#   BESIDE=CHECKOUT benchmarks/all_gpus.sh FOLDER ag-gemm library     # these two in another checkout as well, in turn, named old-*
#
# PARTS, all if none is named: tests; checks (of each distributed step of kernels/); perf (each step beside NCCL with cuBLAS, torch's fused
# operators, and the product tuned alone); ag-gemm (216 configs beside an exhaustive search); vanilla (the same beside triton.autotune,
# minutes); library (chunk_gla of fla-core and a state-space scan, cold and hit); split (a tuning script on all GPUs, on one, with one rank
# killed); hosts (half of the GPUs as one host, half as another; one of them is lost). FOLDER gets a file for each command, rank 0's logs, and
# summary.txt: exit status, seconds and command. Without a GPU all run small, under Triton's interpreter, to try this script: what needs a
# GPU says so.
set -uo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    [[ ${1:-} == -h || ${1:-} == --help ]]
    exit $((2 * $?))
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit
shift
(($#)) || set -- tests checks perf ag-gemm vanilla library split hosts
for part; do
    case $part in
        tests | checks | perf | ag-gemm | vanilla | library | split | hosts) ;;
        *) echo "${0##*/}: no part $part: tests, checks, perf, ag-gemm, vanilla, library, split, hosts" >&2; exit 2 ;;
    esac
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) && cd "$root" || exit
python=python3
if [[ -x .venv/bin/python ]]; then python=$root/.venv/bin/python; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
n_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit
if ((n_gpus == 0)); then export TRITON_INTERPRET=1; fi
trees=("$root" ${BESIDE:+"$(cd "$BESIDE" && pwd)"}) || exit
steps=(ag_gemm gemm_rs gemm_allreduce ag_moe moe_reduce_rs)
kernels='' records=''  # folders of caches that commands share

# run NAME LIMIT COMMAND...: in a folder and with caches of its own; output in NAME.txt, a line in summary.txt.
run() {
    local name=$1 limit=$2 began=$SECONDS status work shown
    shift 2
    work=$(mktemp -d) shown=$(tr -s '\n ' ' ' <<<"${*//"$root/"/}")
    echo "$ $shown" >"$out/$name.txt"
    (cd "$work" && TRITON_CACHE_DIR=${kernels:-$work/triton} DIST_TUNE_CACHE_DIR=${records:-$work/records} \
        timeout --kill-after=10 "$limit" "$@") >>"$out/$name.txt" 2>&1
    status=$?
    printf '%s: exit %d, %d s: %s\n' "$name" "$status" $((SECONDS - began)) "$shown" | tee -a "$out/summary.txt"
    if [[ -f $work/.autotune_logs/rank-0.log ]]; then cp "$work/.autotune_logs/rank-0.log" "$out/$name-rank-0.log"; fi
    rm -rf "$work"
}

# launched TREE NAME LIMIT SCRIPT...: on all ranks, in this checkout or the one beside it.
launched() {
    PYTHONPATH=$1${PYTHONPATH#"$root"} run "$([[ $1 == "$root" ]] || echo old-)$2" "$3" "$1/launch/launch.sh" "$1/$4" "${@:5}"
}

tests() {
    run tests 600 "$python" -m pytest -v -m gpu "$root/tests/gpu" --durations=20 -rs -p no:cacheprovider -o addopts=--import-mode=importlib
}

checks() {
    local step
    for step in "${steps[@]}"; do run "${step//_/-}-check" 200 "$root/launch/launch.sh" "$root/kernels/$step.py" --case check; done
}

perf() {
    local step
    for step in "${steps[@]}"; do run "${step//_/-}-perf" 200 "$root/launch/launch.sh" "$root/kernels/$step.py" --case perf; done
}

ag-gemm() {
    local tree
    for tree in "${trees[@]}"; do
        launched "$tree" ag-gemm-216 280 benchmarks/bench_tuning.py --tuners exhaustive,racing --disk-repeats 0
    done
}

vanilla() {
    local shape=(--shape 4096,11008,4096)
    if ((n_gpus == 0)); then shape=(); fi
    run ag-gemm-vanilla 290 "$root/launch/launch.sh" "$root/benchmarks/bench_tuning.py" \
        --tuners vanilla,racing --cold-repeats 1 --disk-repeats 0 --repeats 1 "${shape[@]}"
}

library() {
    local n tree
    for n in 1 2; do
        for tree in "${trees[@]}"; do
            kernels=$(mktemp -d) records=$(mktemp -d)
            launched "$tree" chunk-gla-cold-$n 100 benchmarks/chunk_gla.py cold
            launched "$tree" chunk-gla-hit-$n 100 benchmarks/chunk_gla.py hit
            launched "$tree" scan-cold-$n 100 benchmarks/chunk_gla.py cold --step scan
            launched "$tree" scan-hit-$n 100 benchmarks/chunk_gla.py hit --step scan
            rm -rf "$kernels" "$records"
        done
    done
    kernels='' records=''
}

split() {
    local script=$root/launch/tune_a8w8_blockscale.py options=(--max-configs 250) kill_after=15 all=("$root/launch/launch.sh") one
    one=(env CUDA_VISIBLE_DEVICES=0 "$python")
    if ((n_gpus == 0)); then options=(--m 32 64 --n 128 --k 128 --space small --max-configs 3); kill_after=6; fi
    run split-one 200 "${one[@]}" "$script" --save-path "$out/split-one" "${options[@]}"
    kernels=$(mktemp -d)
    run split-all 200 "${all[@]}" "$script" --save-path "$out/split-all" "${options[@]}"
    run split-all-compiled 200 "${all[@]}" "$script" --save-path "$out/split-all-compiled" "${options[@]}"
    run split-one-compiled 200 "${one[@]}" "$script" --save-path "$out/split-one-compiled" "${options[@]}"
    run split-winners 10 diff -r -y -W 200 --suppress-common-lines "$out/split-all" "$out/split-one"
    run split-killed 200 bash -c '
        export MASTER_ADDR=127.0.0.1 MASTER_PORT=29555 WORLD_SIZE=$1 DIST_TUNE_DEADLINE_S=10
        for ((rank = $1 - 1; rank >= 0; rank--)); do RANK=$rank LOCAL_RANK=$rank "${@:3}" & ranks[rank]=$!; done
        sleep "$2"; kill -9 "${ranks[$1 - 1]}" && echo "rank $(($1 - 1)) killed after $2 s" || echo "it had ended before $2 s"
        wait "${ranks[0]}"' killed "$((n_gpus > 0 ? n_gpus : 2))" "$kill_after" "$python" "$script" --save-path "$out/split-killed" "${options[@]}"
    rm -rf "$kernels"
    kernels=''
}

hosts() {
    run hosts 200 "$python" -m tests.faults.hosts $( ((n_gpus == 0 || n_gpus % 2)) || echo --gpus)
}

{
    echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(OMP_NUM_THREADS= nproc) cores"
    "$python" -c 'import sys, torch, triton; print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)'
    if ((n_gpus > 0)); then nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader; fi
} | tee -a "$out/summary.txt"
for part; do "$part"; done
