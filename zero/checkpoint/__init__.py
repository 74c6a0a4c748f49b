"""Checkpoints: saved at any stage on any number of ranks, loaded at any other.

A checkpoint stores full tensors by name, each in shards; a reader need not know which rank wrote which shard. So there
is nothing to convert between stages, numbers of ranks or partitions: a reader asks for the ranges that it needs.

    format      the index: every tensor by name, and its shards, to JSON and back
    values      values that are no tensors, to JSON and back
    storage     directories, and object stores through fsspec
    files       safetensors files with checksums; ranges of bytes
    directory   a run's checkpoints, which is the latest, and how a new one is published
    agree       what ranks send one another
    shards      what one rank has of a model and its optimizers, at every stage
    rank_files  what one rank writes of it, its file, and the index made of all files
    write       save
    source      a checkpoint that is open for reading
    read        load: what one rank reads of it, and what does not fit
    export      the weights as other libraries read them
    importing   other libraries' checkpoints; torch_distributed reads torch's
    __main__    the command line

torch.distributed.checkpoint (2.13) was tried as the engine, and is used to read and write its own format (`export_dcp`,
`importing`). For the rest it was not used. Its chunks are boxes, and a shard of the even cut begins and ends within a
row. Its formats store options and step counts as pickles, or not at all. An altered byte is loaded without an error,
and a save overwrites the last good checkpoint. Its storage over fsspec copies what it reads, and renames what it
publishes, which an object store does by copying. Its asynchronous save needs a second process group; here the thread
sends nothing.
"""

from zero.checkpoint.format import CheckpointError
from zero.checkpoint.read import load
from zero.checkpoint.write import Saving, save

__all__ = ["CheckpointError", "Saving", "load", "save"]
