"""Guided search of sites with many candidates: which of them are compiled and timed."""
