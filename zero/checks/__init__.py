"""What is refused, said once for all stages."""

from zero.checks import guard, state_dicts, step_checks  # noqa: F401 - they register themselves
