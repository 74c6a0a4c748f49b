"""Models that torch's tensor parallelism has parallelised over one dimension of a DeviceMesh train over another:
`parallelize_module` has made DTensors of their parameters, and each rank's local tensor is sharded.

    at rest      the module has no DTensors, but this rank's local tensors, or at stage 3 the rank's shards of them
    in forward   the module has DTensors of these, with the placements that they had; autograd leads from them to the
                 plain parameters, as in torch.distributed.tensor.parallel.ddp
    summoned     DTensors (summon_full_params), with gradients that are DTensors
    state_dict   DTensors; full tensors load, and so do DTensors

A gradient arrives at the plain parameter with the placements of the parameter: the sums over tensor parallel ranks,
such as those of a replicated parameter behind SequenceParallel, are DTensor's.

table    which plain parameter stands for which DTensor
parts    the plain parameters, which are sharded: of what they are parts
shown    modules hold plain parameters, and show DTensors while they run and in their state_dict
"""
