"""Triton's compiler passes while a tuning compiles: what is changed in them, and what of their work is used again."""
