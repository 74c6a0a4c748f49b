"""What belongs to torch: DistributedDataParallel, options of FSDP1, optimizers that exist already."""

from zero.interop import ddp, from_optimizer, torch_options  # noqa: F401 - they register themselves
