#!/usr/bin/env bash
# The set-up behind make: .venv with this checkout importable. Repeating it is harmless.
#
#   launch/setup.sh run     what running needs
#   launch/setup.sh test    the tools of tests and checks as well, and what builds the pages of docs/
#
# A torch >= 2.11 of the base python (PYTHON, default python3) is used as it is, with the triton beside it. Otherwise
# launch/constraints.txt says which to install: a range would fetch gigabytes of CUDA packages for a CPU machine.
set -euo pipefail
case ${1:-run} in
    run | test) ;;
    *) # The help is the comment above.
        sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        [[ $1 == -h || $1 == --help ]]
        exit ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=${PYTHON:-python3} python=.venv/bin/python

die() { echo "launch/setup.sh: $*" >&2; exit 1; }
has_torch() { "$1" -c 'import torch; raise SystemExit(torch.__version__ < (2, 11))' 2>/dev/null; }
has_triton() { "$1" -c 'import triton; raise SystemExit(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6))' 2>/dev/null; }
has_modules() { "$python" -c "import $1" 2>/dev/null; }
version() { "$python" -c "from importlib.metadata import version; print(version('$1'))"; }

"$base" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 14))' \
    || die "needs Python 3.11 to 3.13, found '$("$base" --version 2>&1)'; name another one: make PYTHON=/path/to/python3.12 ..."
[[ -x .venv/bin/pip ]] || "$base" -m venv .venv \
    || die "$base cannot make a virtual environment (see above); Debian and Ubuntu keep venv in the package python3-venv"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

if ! has_torch "$python" && has_torch "$base"; then
    # Not --system-site-packages: that shows the system's packages, not those of a base python that is an environment itself.
    "$base" -c 'import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]' > "$site/base.pth"
fi

runtime="loguru, numpy, pydantic, pydantic_settings, rich, typer"
if [[ ${1:-run} == run ]] && has_torch "$python" && has_triton "$python" && has_modules "$runtime"; then
    pwd > "$site/checkout.pth"  # nothing to install, so no network needed
    exit
fi

pins=.venv/constraints.txt
cp launch/constraints.txt "$pins"
has_torch "$python" || { echo "installing torch"; "$python" -m pip install --quiet -c <(grep '^torch==' "$pins") torch; }
# What is there stays: torch's own triton too, where torch came with one.
sed -i "s/^torch==.*/torch==$(version torch)/" "$pins"
if has_triton "$python"; then sed -i "s/^triton==.*/triton==$(version triton)/" "$pins"; fi
echo "installing dist_tune and what it needs"
what=. bytecode=--compile
if [[ ${1:-run} == test ]]; then what=".[test]" bytecode=--no-compile; fi  # a hundred packages, of which tests import a few
if "$python" -m pip install --quiet $bytecode -c "$pins" -e "$what"; then exit; fi

if ! has_triton "$python" || ! has_modules "$runtime, pytest, pytest_timeout, hypothesis"; then die "pip failed (see above)"; fi
echo "launch/setup.sh: pip failed (see above); going on with the versions at hand" >&2
pwd > "$site/checkout.pth"
