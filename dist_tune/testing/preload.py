"""For the fork server of ranks alone: what each rank would make anew, made once and inherited.

It is Triton's digest of its own 0.4 GB, a part of each compiled kernel's key: 0.3 to 0.7 CPU-seconds.
"""

from contextlib import suppress

from triton.runtime.cache import triton_key

with suppress(Exception):  # Triton raises it in a rank's first launch
    triton_key()
