"""Tuners with a run of a library's own, and wrappers that keep launches."""
