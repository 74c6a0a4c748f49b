"""`python -m zero.report`."""

from zero.report.environment import environment

print(environment())
