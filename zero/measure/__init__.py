"""What an optimizer reads and writes, measured by stepping small tensors. Nothing here uses ranks.

kinds      whether an optimizer may be cut inside parameters, sharded between them, or not at all
probe      how that is measured, without a trace in the process
built      the kind of an optimizer that the user has built
"""
