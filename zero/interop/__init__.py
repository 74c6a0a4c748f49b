"""What belongs to torch: DistributedDataParallel, options of FSDP1, distributed checkpoints, living optimizers."""
