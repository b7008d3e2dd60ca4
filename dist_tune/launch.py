"""``python -m dist_tune.launch`` and ``dist-tune launch``: the script launch.sh, from a checkout or from an installed package.

The script does all the work, with this Python in place of one that it would look for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_PLACES = ("launch.sh", "../launch/launch.sh")
"""Relative to this file: in a wheel, and in a checkout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by torchrun; returns an exit code only if that is impossible."""
    here = Path(__file__).resolve().parent
    script = next((path for place in _PLACES if (path := (here / place).resolve()).is_file()), None)
    if script is None:
        sys.stderr.write(f"dist-tune launch: launch.sh is missing in {here}: install dist-tune again\n")
        return 1
    words = sys.argv[1:] if argv is None else argv
    # Sourced, so that $0 in its messages is the command as it was typed, and `python` a variable that no child inherits.
    source = 'python=$1 script=$2; shift 2; source "$script"'
    try:
        os.execvp("bash", ["bash", "-c", source, "dist-tune launch", sys.executable, str(script), *words])
    except FileNotFoundError:
        sys.stderr.write("dist-tune launch: bash is not installed, which launch.sh needs\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
