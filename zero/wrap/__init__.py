"""What several stages need around a module and its backward.

wrapper, ddp      base class of the wrappers; what a module is; DistributedDataParallel within and around
tensors, buffers  tensors in what modules take and return; buffers, sent from the first rank
bucket, gradients how gradients reach their owners at stages 2 and 3; what stands in `param.grad`
dtensor_checks    steps that would be wrong for DTensors
"""
