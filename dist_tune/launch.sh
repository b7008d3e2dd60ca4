#!/usr/bin/env bash
# torchrun with sane defaults: one rank per GPU of this machine, or two CPU ranks under the Triton interpreter.
#
#   launch/launch.sh [--supervise] [torchrun options] script.py [script arguments]    from a checkout
#   dist-tune launch [--supervise] [torchrun options] script.py [script arguments]    from an installed package
#
# --step=package.module:Class.method: tunes this function or method of the unchanged program, as contextual_autotune would; several times
# for several; one that is not there ends the job. --is-dist: all ranks decide together (is_dist=True). Behind torchrun itself:
# -m dist_tune.install --step ... script.py
#
# --supervise: when a rank dies (a kill, an illegal access, a config that ends its process, a config that never returns), all ranks are
# started again after 1, 2 and 4 s, and tunings go on from their journals. --max-restarts=N: so often (3); each restart waits twice as
# long as the one before, 30 s at most. The script must start by itself: it is run from its beginning.
#
# Several machines: the same command on each, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, or as options of those
# names (NODE_RANK says who hosts the rendezvous). Under SLURM none is needed: srun --ntasks-per-node=1 launch/launch.sh ...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=${0##*/}
die() { echo "$name: $*" >&2; exit 2; }

# The help is the comment above. Only before the script: behind it --help is the script's.
for word in "$@"; do
    case $word in
        -h | --help) sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit ;;
        *.py | -m | --module | --no?python) break ;;
    esac
done

# An installed package is importable as it is, a checkout by PYTHONPATH. `dist-tune launch` has set python to its own.
root=
if [[ ${here##*/} == launch || -f ${here%/*}/pyproject.toml ]]; then root=${here%/*}; fi
if [[ $name != "dist-tune launch" ]]; then
    python=python3
    if [[ -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
fi
n_gpus=$("$python" -c 'import torch; print(torch.accelerator.device_count())') || die "$python has no usable torch; in a checkout 'make tune' sets one up"

nproc_per_node=$((n_gpus > 0 ? n_gpus : 2)) nnodes=${NNODES:-${SLURM_NNODES:-1}} node_rank=${NODE_RANK:-${SLURM_NODEID:-}}
master_addr=${MASTER_ADDR:-} master_port=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 10000))}
max_restarts='' passed=() steps=() is_dist=() own_rendezvous=no supervises=no
while (($#)) && [[ $1 != *.py && $1 != -m && $1 != --module && $1 != --no?python ]]; do
    option=${1%%=*} option=${option//_/-}
    case $option in
        --nproc-per-node | --nnodes | --node-rank | --master-addr | --master-port | --max-restarts | --step)
            variable=${option#--}
            if [[ $1 != *=* ]]; then (($# > 1)) || die "$1 needs a value"; set -- "$1=$2" "${@:3}"; fi
            if [[ $option != --step ]]; then printf -v "${variable//-/_}" %s "${1#*=}"
            elif [[ $1 == *:* ]]; then steps+=("$1")
            else die "--step wants package.module:function or package.module:Class.method, got ${1#*=}"; fi ;;
        --is-dist) is_dist=("$1") ;;
        --supervise) supervises=yes ;;
        --rdzv-* | --standalone) own_rendezvous=yes passed+=("$1") ;;
        *) passed+=("$1") ;;
    esac
    shift
done
(($#)) || die "no script: $name [--supervise] [torchrun options] script.py [script arguments]"
[[ $1 != *.py || -f $1 ]] || die "$1: no such file"
((${#steps[@]} >= ${#is_dist[@]})) || die "--is-dist is for --step"
if ((${#steps[@]})); then
    [[ $1 != --no?python ]] || die "--step needs a program in Python, not $1"
    set -- -m dist_tune.install "${steps[@]}" "${is_dist[@]}" "$@"
fi
if [[ $supervises == yes ]]; then
    max_restarts=${max_restarts:-3}
    if [[ $1 == --no?python ]]; then shift; else set -- "$python" -u "$@"; fi
    # Each rank waits by itself, because torchrun starts dead ranks again at once: ports, devices and file servers need a moment.
    delayed='n=${TORCHELASTIC_RESTART_COUNT:-0}; if ((n > 0)); then sleep "$((n < 6 ? 1 << (n - 1) : 30))"; fi; exec "$@"'
    set -- --no-python -- bash -c "$delayed" launch.sh "$@"
# Or torchrun takes --m of a script's own options for an abbreviation of its --max-restarts.
elif [[ $1 == *.py ]]; then
    set -- -- "$@"
elif ((${#steps[@]})); then
    set -- -m -- "${@:2}"
fi
if [[ -n $max_restarts ]]; then passed=("--max-restarts=$max_restarts" "${passed[@]}"); fi

if [[ $own_rendezvous == yes ]]; then
    rendezvous=(--rdzv-backend=c10d --node-rank="${node_rank:-0}")
elif [[ $nnodes == 1 ]]; then
    rendezvous=(--standalone)
else
    nodelist=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    if [[ -z $master_addr && -n $nodelist ]]; then master_addr=$(scontrol show hostnames "$nodelist") master_addr=${master_addr%%$'\n'*}; fi
    [[ -n $master_addr ]] || die "$nnodes machines need MASTER_ADDR, the host name of the first"
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="$master_addr:$master_port" --rdzv-id="${SLURM_JOB_ID:-dist_tune}")
    if [[ -n $node_rank ]]; then rendezvous+=(--rdzv-conf="is_host=$((node_rank == 0))"); fi
fi

if [[ -n $root ]]; then export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if ((n_gpus == 0)); then export TRITON_INTERPRET="${TRITON_INTERPRET-1}"; fi
# Ranks share the store of torchrun's agent, which has its port from the start. Where ranks may start again, supervised or not, each
# attempt needs a new store, or it meets the addresses of dead ranks and fails as well (pytorch issue 135712). Rank 0 has it then, at a
# port that the agent beside it chose, and told all machines, up to 20 s before: torchrun takes one that any connection may get by then.
# Here it is one that connections are not given, that is free, and that no attempt had before. If a program takes it in those seconds,
# the attempt ends and the next has another. 30000 to 32767 are left out: Kubernetes forwards them.
torchrun=(-m torch.distributed.run)
if [[ ${max_restarts:-0} != 0 || $nnodes == *:* ]]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
    if [[ $supervises == yes ]]; then export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; fi
    torchrun=(-c '
import random, socket, sys
from pathlib import Path
from torch.distributed import run
from torch.distributed.elastic.rendezvous import api

low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
ports = [p for p in (*range(20000, 30000), *range(61000, 65536)) if not low <= p <= high]
random.shuffle(ports)
any_free_port = api.get_free_port

def get_free_port():
    while ports:
        port = ports.pop()
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    return any_free_port()

api.get_free_port = get_free_port
sys.argv[0] = "torchrun"
run.main()
')
fi
# NVLink multicast stays off unless asked for: nothing here uses it, and a crash in the middle of it can cost the host its GPUs.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
exec "$python" "${torchrun[@]}" --nnodes="$nnodes" --nproc-per-node="$nproc_per_node" "${rendezvous[@]}" "${passed[@]}" "$@"
