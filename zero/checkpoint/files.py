"""One safetensors file, written as a stream.

    8 bytes     length of the header
    header      JSON: every tensor's dtype, shape and position
    data        the tensors, one after another

The index says where in a file a tensor is, so that no reader needs the header. It has a checksum (CRC-32) of every
BLOCK bytes, so that a reader of a range can check that range without reading the rest.

A part is read directly into its target, or BUFFER bytes at a time where the target is on another device or has another
dtype. A tensor that is stored with its dimensions in another order than the target's, or in other slices, is read full.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.format import INDEX, LONGEST, NAMES, Entry, Index, Part, all_of
from zero.checkpoint.storage import AT_A_TIME, Place, reading

BLOCK = 1 << 22
"""Bytes a checksum."""

BUFFER = 1 << 24
"""Bytes that are copied at a time where tensors are not read or written in place. A multiple of BLOCK."""

CACHED = 1 << 20
"""Bytes that stay in the processor's cache between computing their checksum and copying them."""

# The fewest bytes for which a progress bar is shown.
_LONG = 1 << 30


@dataclass(frozen=True)
class Chunk:
    """A tensor to be written under a key. `values` yields its elements, flat, perhaps in several tensors."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


# Not by the safetensors package, which does not sync to disk, takes no streams and has no checksums.
def write(
    place: Place, chunks: Sequence[Chunk], tick: Callable[[int], object]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Writes the chunks to disk. Returns the file's entry in the index, and the first byte of each chunk by its key."""
    chunks = sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize)  # so that every tensor is aligned
    ends = accumulate(chunk.nbytes for chunk in chunks)
    offsets = {chunk.key: [end - chunk.nbytes, end] for chunk, end in zip(chunks, ends, strict=True)}
    tensors = {
        chunk.key: {"dtype": NAMES[chunk.dtype], "shape": chunk.shape, "data_offsets": offsets[chunk.key]}
        for chunk in chunks
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    copies, sums, at = buffer(), list[int](), 0
    tensors_bytes = (host_bytes(values, copies) for chunk in chunks for values in chunk.values())
    with place.write() as file:
        for data in chain([memoryview(head)], chain.from_iterable(tensors_bytes)):
            begin = at
            while data:
                some = data[: min(CACHED, BLOCK - at % BLOCK)]
                if at % BLOCK == 0:
                    sums.append(0)
                sums[-1] = zlib.crc32(some, sums[-1])
                file.write(some)
                data, at = data[len(some) :], at + len(some)
            if begin > 0:  # not for the header
                tick(at - begin)
    assert at == len(head) + sum(chunk.nbytes for chunk in chunks), "chunks have yielded too few bytes, or too many"
    return {"bytes": at, "crc32": sums}, {key: len(head) + start for key, (start, _) in offsets.items()}


def buffer() -> Callable[[], Tensor]:
    """BUFFER bytes on the CPU, which are there from the first call on."""
    return cache(lambda: torch.empty(BUFFER, dtype=torch.uint8, device="cpu"))


def host_bytes(flat: Tensor, copies: Callable[[], Tensor]) -> Iterator[memoryview]:
    """A flat tensor's bytes: on the CPU its own memory, from other devices a buffer of copies; valid until the next."""
    for some in flat.detach().split(BUFFER // flat.element_size()) if flat.numel() else ():
        here = some.is_cpu and some.is_contiguous()
        yield as_bytes(some if here else copies().view(some.dtype)[: len(some)].copy_(some))


@contextmanager
def progress(what: str, nbytes: int, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """The function to call with the bytes that are done. It shows a bar on a terminal, if tqdm is installed."""
    if shown and nbytes >= _LONG and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
        with importlib.import_module("tqdm").tqdm(total=nbytes, desc=what, unit="B", unit_scale=True) as bar:
            yield bar.update
    else:
        yield lambda done: None


def checksum(flat: Tensor) -> int:
    found = 0
    for data in host_bytes(flat, buffer()):
        found = zlib.crc32(data, found)
    return found


def as_bytes(flat: Tensor) -> memoryview:
    """The memory of a flat, contiguous tensor on the CPU."""
    # Not by `numpy()`, after which torch no longer lets the tensor's storage be resized, as FSDP does with shards.
    memory: Any = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat  # lives as long as the memoryview
    return memoryview(memory).cast("B")


class Source(ExitStack):
    """A checkpoint's index, and its files, which stay open from their first use until the context is left."""

    def __init__(self, directory: Place) -> None:
        super().__init__()
        self.directory = directory
        place = directory / INDEX
        with reading(place):
            text = place.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ValueError(f"{place} has more than the {LONGEST} bytes that an index may have")
        self.digest = hashlib.sha256(text).hexdigest()
        try:
            self.index = Index.loads(text.decode())
        except ValueError as error:
            raise ValueError(f"{place} {error}") from None
        self._files: dict[str, Any] = {}
        self._copies = buffer()

    def check(self, parts: Iterable[tuple[Entry, Part]], *, shown: bool = False) -> None:
        """Reads the blocks of the parts and compares their checksums. shown: show progress."""
        needed: dict[str, set[int]] = {}
        for entry, part in parts:
            in_order = part.full.counting == entry.geometry.counting
            for name, low, high, _ in self._places(entry, part if in_order else all_of(entry.geometry)):
                needed.setdefault(name, set()).update(range(low // BLOCK, -(-high // BLOCK)))
        blocks = [(name, number) for name, numbers in sorted(needed.items()) for number in sorted(numbers)]
        with progress("checking", len(blocks) * BLOCK, shown) as tick:
            for name, number in blocks:
                self._check(name, number)
                tick(BLOCK)

    def fill(self, target: Tensor, entry: Entry, part: Part) -> None:
        """Reads a part of a stored tensor into a flat tensor of as many elements, and converts to its dtype."""
        stored = entry.geometry
        if part.full.counting != stored.counting:
            for low, one in part.full.counted(self._full(entry)):
                start, stop = max(part.start - low, 0), min(part.stop - low, one.numel())
                if start < stop:
                    target[low + start - part.start : low + stop - part.start] = one.reshape(-1)[start:stop]
            return
        direct = target.dtype == stored.dtype and target.is_cpu and target.is_contiguous()
        for name, low, high, at in self._places(entry, part):
            section = target[at : at + (high - low) // stored.dtype.itemsize]
            if direct:
                self._read(name, section, low)
                continue
            copies = self._copies().view(stored.dtype)
            for some in section.split(len(copies)):
                self._read(name, copies[: len(some)], low)
                some.copy_(copies[: len(some)])
                low += len(some) * stored.dtype.itemsize

    def _full(self, entry: Entry) -> Tensor:
        stored = entry.geometry
        full = torch.empty_strided(stored.shape, stored.strides, dtype=stored.dtype, device="cpu")
        for low, one in stored.counted(full):
            flat = one.reshape(-1)
            self.fill(flat, entry, Part(stored, low, low + len(flat)))
            if flat.data_ptr() != one.data_ptr():  # a copy, because memory has not its order
                one.copy_(flat.view(one.shape))
        return full

    def stream(self, entry: Entry, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields a full tensor in a dtype, row-major and flat, a buffer at a time; each is valid until the next."""
        full = entry.geometry
        if full.counting != (None, None):  # it has to be read at once
            yield self._full(entry).reshape(-1).to(dtype)
            return
        copies = self._copies().view(full.dtype)
        for start in range(0, full.numel, len(copies)):
            part = Part(full, start, min(start + len(copies), full.numel))
            self.fill(copies[: part.numel], entry, part)
            yield copies[: part.numel].to(dtype)

    def _places(self, entry: Entry, part: Part) -> Iterator[tuple[str, int, int, int]]:
        """Where a part is stored: file, first byte, end byte, and the element of the part at the first byte."""
        for shard in entry.shards:
            start, stop = max(shard.start, part.start), min(shard.stop, part.stop)
            if start < stop:
                size = entry.geometry.dtype.itemsize
                low = shard.at + (start - shard.start) * size
                yield shard.file, low, low + (stop - start) * size, start - part.start

    def _check(self, name: str, block: int) -> None:
        """Reads a block of a file and compares its checksum."""
        place, file = self.directory / name, self.index.files[name]
        low, high = block * BLOCK, min((block + 1) * BLOCK, file["bytes"])
        buffer, found = torch.empty(CACHED, dtype=torch.uint8, device="cpu"), 0
        for at in range(low, high, len(buffer)):
            some = buffer[: min(len(buffer), high - at)]
            self._read(name, some, at)
            found = zlib.crc32(as_bytes(some), found)
        if [found] != file["crc32"][block : block + 1]:
            raise ValueError(f"{place} was altered: bytes {low} to {high} are not those that were written")

    def _read(self, name: str, target: Tensor, at: int) -> None:
        """Fills a flat, contiguous tensor on the CPU with the bytes of a file from `at` on."""
        place, data, size = self.directory / name, as_bytes(target), self.index.files[name]["bytes"]
        while data:
            with reading(place):
                if name not in self._files:
                    self._files[name] = self.enter_context(place.open())
                    if (found := self._files[name].seek(0, os.SEEK_END)) != size:
                        raise ValueError(f"{place} has {found} bytes, not the {size} that were written")
                self._files[name].seek(at)
                count = self._files[name].readinto(data[:AT_A_TIME])
            if count == 0:
                raise ValueError(f"{place} ends before byte {at + len(data)}: it is incomplete")
            data, at = data[count:], at + count
