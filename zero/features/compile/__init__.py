"""torch.compile: hooks that are not traced, models compiled as a whole or in pieces, and what is refused.

forward    the forward of a model, and the hooks of units
tracing    gradients that are hidden while code is traced
compiled   which modules were compiled, and how
"""

from zero.features.compile.compiled import compiling_problem
from zero.features.compile.forward import Compiling
from zero.fsdp.events import makers
from zero.shards.refusals import refusals

makers.append(Compiling)
refusals.append(lambda wrapping: compiling_problem(wrapping.module, wrapping.units, wrapping.freed))
