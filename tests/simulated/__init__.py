"""A GPU and a process group of NCCL's that are not there, in one process: what is ordered after what, and what a step
would wait for.

device    streams and events, in the place of torch.cuda, with vector clocks and with times
memory    every access to a storage: whether it comes after what wrote the storage, and before what frees it
group     collectives on the current stream, as NCCL's are, among ranks that do all the same
network   what these cost, by kind, among hosts
world     all of these together
scenarios steps at every stage in it

Tensors lie on the CPU, and have values; what runs on a stream runs at once, and is noted.
"""
