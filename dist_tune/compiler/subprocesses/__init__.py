"""Processes that run Triton's compiler passes for a rank, their output and what they leave behind."""
