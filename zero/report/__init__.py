"""What a rank holds and has sent, beside what was planned; and as a command, what there is on this machine."""

from zero.report.held import Report, report

__all__ = ["Report", "report"]
