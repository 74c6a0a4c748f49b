"""zero.step_in_backward; see call.py.

optimizer  steps of an OSS in backward, at stage 2
units      steps of the user's optimizer in backward, at stage 3
"""

from zero.features.step_in_backward.call import step_in_backward

__all__ = ["step_in_backward"]
