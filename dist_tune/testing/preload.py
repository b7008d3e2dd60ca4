"""For the fork server of ranks alone: what each rank would do anew, done once and inherited.

It is Triton's digest of its own 0.4 GB, a part of each compiled kernel's key: 0.3 to 0.7
CPU-seconds. And what has been imported is left out of garbage collections: one that looks through
it copies its pages, in each rank.
"""

import atexit
import gc
from contextlib import suppress

from triton.runtime.cache import triton_key

with suppress(Exception):  # Triton raises it in a rank's first launch
    triton_key()

gc.collect()
gc.freeze()
# Or the bindings of Triton 3.9 report what was never freed when the server ends.
atexit.register(gc.unfreeze)
