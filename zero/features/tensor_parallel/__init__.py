"""Models that torch's tensor parallelism has parallelised over one dimension of a DeviceMesh train over another:
`parallelize_module` has made DTensors of their parameters, and each rank's local tensor is sharded.

    at rest      the module has plain parameters, this rank's local tensors, or at stage 3 the rank's shards of them
    in forward   the module has DTensors of these, with the placements that they had; autograd leads from them to the
                 plain parameters, as in torch.distributed.tensor.parallel.ddp
    summoned     DTensors (summon_full_params), with gradients that are DTensors
    state_dict   DTensors; full tensors load, and so do DTensors

A gradient arrives at the plain parameter with the placements of the parameter: the sums over tensor parallel ranks,
such as those of a replicated parameter behind SequenceParallel, are DTensor's.
"""

from zero.features.tensor_parallel.checks import WrappedCheck, watch_steps
from zero.features.tensor_parallel.parts import TensorParallel
from zero.features.tensor_parallel.shown import ShowsUnits
from zero.features.tensor_parallel.summoned import SummonsDTensors
from zero.fsdp.events import model_events
from zero.fsdp.weights import weights
from zero.shards.parts import parts
from zero.shards.steps import checks

parts.append(TensorParallel())
model_events.append(ShowsUnits)
checks.append(WrappedCheck)
weights.append(SummonsDTensors())
watch_steps()
