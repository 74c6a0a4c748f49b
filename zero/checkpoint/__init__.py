"""Checkpoints: saved at any stage on any number of ranks, loaded at any other.

A checkpoint stores full tensors by name, each in shards; a reader need not know which rank wrote which shard. So there
is nothing to convert between stages, numbers of ranks or partitions: a reader asks for the ranges that it needs.

    format      the index: every tensor by name, and its shards; values that are no tensors; to JSON and back
    storage     mounted directories and object stores, through fsspec; a run's checkpoints, which of them is the latest
    files       safetensors files with checksums, written as a stream; a checkpoint that is open for reading
    shards      the ranks, and what one of them has of a model and its optimizers, at every stage
    write       save: what one rank writes, its file, and the index made of all files
    read        load: what one rank reads of it, and what does not fit
    export      the weights as Hugging Face's libraries read them
    dcp         checkpoints of torch.distributed.checkpoint, read and written
    __main__    the command line
"""

# Checkpoints hold no pickle. One of torch.distributed.checkpoint (2.13) holds options and step counts as pickles, which
# run code where they are loaded without the restrictions of dcp.py, and has no checksums: an altered byte is loaded
# without an error. Its asynchronous save sends, and needs a second process group; here the thread sends nothing.

from zero.checkpoint.format import CheckpointError
from zero.checkpoint.read import load
from zero.checkpoint.write import Saving, save

__all__ = ["CheckpointError", "Saving", "load", "save"]
