"""The command dist-tune: what is cached, why a key misses, what works on this machine.

Each subcommand is a module; with --json there is one JSON document on stdout.
Reads the cache; tunes nothing.
"""

from dist_tune.cli.main import main

__all__ = [
    "main",
]  # fmt: skip
