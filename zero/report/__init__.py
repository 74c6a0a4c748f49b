"""What a rank holds and has sent, beside the plan; and a command that describes this machine."""

from zero.report.held import Report, report

__all__ = ["Report", "report"]
