"""Checkpoints: saved at any stage on any number of ranks, loaded at any other.

What is stored is full tensors by name, in pieces; who wrote which piece does not matter to who reads it. So there is
nothing to convert between stages, numbers of ranks or cuts: a reader asks for the ranges that it needs.

    format      the index: every tensor by name, and its pieces, to JSON and back
    values      what is no tensor, to JSON and back
    storage     directories, and object stores through fsspec
    files       safetensors files with checksums; ranges of bytes
    directory   a run's checkpoints, which is the latest, and how one comes to be seen
    agree       what ranks tell one another
    shards       what one rank has of a model and its optimizers, at every stage
    save_plan   what one rank writes of it
    rank_files  the files that ranks write, and the index made of them
    staging     copies, to be written behind training
    write       save
    source      a checkpoint that is open for reading
    load_plan   what one rank takes of it, and what does not fit
    read        load
    export, importing, __main__     for and from others

torch.distributed.checkpoint (2.13) was tried as the engine, and serves where its own format is read and written
(`export_dcp`, `importing`). For the rest it was not used:

- Its chunks are boxes. A segment of the even cut begins and ends within a row, so that it is up to three boxes of a
  matrix and more of a convolution, or else stored flat, which others can no longer read by name and shape.
- Its own format keeps metadata, step counts and options as pickles. Its safetensors format
  (HuggingFaceStorageWriter) holds tensors only: with a step count beside them, what it wrote could not be read again.
- Both load a file with an altered byte without complaint, and write where the last good checkpoint is.
- Its storage over fsspec is private, reads through streams, which copy, and publishes by renaming, which an object
  store does by copying. fsspec itself is used instead (`storage`).
- Saving behind training needs a second process group; here the thread sends nothing.
"""

from zero.checkpoint.format import CheckpointError
from zero.checkpoint.read import load
from zero.checkpoint.write import Saving, save

__all__ = ["CheckpointError", "Saving", "load", "save"]
