"""What belongs to torch and others: DistributedDataParallel, options of FSDP1, living optimizers, names of theirs."""

from zero.interop import ddp, from_optimizer, names, torch_options  # noqa: F401 - they register themselves
