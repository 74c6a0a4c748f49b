"""torch.compile: hooks that are not traced, models compiled as a whole or in pieces, and what is refused.

forward    the forward of a model, the hooks of units, and gradients that are hidden while code is traced
compiled   which modules were compiled, and how

torch.compile accepts units, the module or the FSDP. Graphs break where units begin and end, so only units can be
compiled with fullgraph=True. If the whole module is compiled, its first forward in training and its first in evaluation
run uncompiled, to find which modules read parameters of other units. If units are compiled, FSDP does not search for
such reads, and no module may read parameters of another unit. On GPUs CUDA graphs are refused:
mode="reduce-overhead", "max-autotune" and triton.cudagraphs of torch.compile, and torch.cuda.graph.
"""

from zero.features.compile.compiled import compiling_problem
from zero.features.compile.forward import Compiling
from zero.fsdp.events import makers
from zero.shards.arguments import refusals

makers.append(Compiling)
refusals.append(lambda wrapping: compiling_problem(wrapping.module, wrapping.units, wrapping.freed))
