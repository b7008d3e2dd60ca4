"""Benchmarks of dist_tune, and simulators that play recorded times; README.md has a command for
each.
"""
