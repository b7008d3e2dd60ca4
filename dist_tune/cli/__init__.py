"""The command dist-tune: what is cached, why a key misses, what works on this machine.

Reads the cache; tunes nothing.

``main`` has the commands and their options; ``records``, ``report`` and ``doctor`` the answers,
``render`` how these are written.
"""

from dist_tune.cli.main import main

__all__ = ["main"]
