"""The command dist-tune: what is cached, why a key misses, what works on this machine.

``main`` has the commands and their options; ``records``, ``report`` and ``doctor`` the answers, ``render`` how these are written.
Reads the cache; tunes nothing.
"""

from dist_tune.cli.main import main

__all__ = [
    "main",
]  # fmt: skip
