#!/usr/bin/env bash
# everything of one GPU run; full output under $OUT
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl; export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1
export DIST_TUNE_CACHE_DIR=/tmp/cache TRITON_CACHE_DIR=/tmp/triton DIST_TUNE_LOG_DIR=$OUT/ranks
{ git log -1 --format=%h 2>/dev/null; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; python3 -c "import torch,triton,sys;print(torch.__version__,triton.__version__,sys.version.split()[0])"; } > $OUT/versions.txt 2>&1
timeout 150 python3 -m pytest -q -m gpu tests/gpu -p no:cacheprovider > $OUT/tests-gpu.txt 2>&1; echo "tests-gpu rc $?"; tail -5 $OUT/tests-gpu.txt
timeout 90 launch/launch.sh kernels/ag_gemm.py --case check > $OUT/ag-check.txt 2>&1; echo "ag check rc $?"; tail -3 $OUT/ag-check.txt
timeout 90 launch/launch.sh kernels/ag_gemm.py --case tune --shape 4096,11008,4096 > $OUT/ag-tune.txt 2>&1; echo "ag tune rc $?"; tail -12 $OUT/ag-tune.txt
timeout 60 launch/launch.sh kernels/ag_gemm.py --case tune --shape 4096,11008,4096 > $OUT/ag-tune-again.txt 2>&1; echo "ag tune again rc $?"; tail -4 $OUT/ag-tune-again.txt
timeout 90 launch/launch.sh kernels/ag_gemm.py --case perf --shape 4096,11008,4096 > $OUT/ag-perf.txt 2>&1; echo "ag perf rc $?"; tail -12 $OUT/ag-perf.txt
timeout 60 python3 kernels/matmul.py --case perf > $OUT/matmul-perf.txt 2>&1; echo "matmul perf rc $?"; tail -6 $OUT/matmul-perf.txt
