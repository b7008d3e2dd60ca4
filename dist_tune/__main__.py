"""``python -m dist_tune`` is ``dist-tune``."""

import sys

from dist_tune.cli import main

if __name__ == "__main__":
    sys.exit(main())
