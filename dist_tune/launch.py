"""``python -m dist_tune.launch`` and ``dist-tune launch``: the script launch.sh beside this file, which launch/launch.sh is as well.

The script does all the work, with this Python in place of one that it would look for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by torchrun; returns an exit code only if that is impossible."""
    script = Path(__file__).resolve().with_name("launch.sh")
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
