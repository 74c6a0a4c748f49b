"""What a rank holds and has sent."""

from zero.report.held import Report, report

__all__ = ["Report", "report"]
