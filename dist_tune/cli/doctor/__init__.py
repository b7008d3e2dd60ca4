"""The command ``dist-tune doctor``: what works on this machine, tried one by one.

Imports torch and Triton, which it tries out; each failure is a finding with the reason and the remedy.
"""

from dist_tune.cli.doctor.examination import Finding, Report, examine, run

__all__ = [
    "Finding", "Report", "examine", "run",
]  # fmt: skip
