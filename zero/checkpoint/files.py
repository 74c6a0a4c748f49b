"""One safetensors file: written as a stream, read by ranges of bytes, each checked.

    8 bytes     length of the header
    header      JSON: every tensor's dtype, shape and position; in "__metadata__" what zero adds
    data        the tensors, one after another

zero adds a checksum (CRC-32) of every BLOCK bytes of data, so that a reader of a range can check that range without
reading the rest, and a checksum of the header, which is in the index. Files are written and read here rather than by
the safetensors package because the package has no checksums, does not sync to disk, and maps entire files. The format
is the same.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.format import DTYPES, NAMES
from zero.checkpoint.storage import AT_A_TIME, Place, reading

BLOCK = 1 << 22
"""Bytes a checksum."""

BUFFER = 1 << 24
"""Bytes that are copied at a time where tensors are not read or written in place. A multiple of BLOCK."""

# Bytes that stay in the processor's cache between computing their checksum and copying them.
_CACHED = 1 << 20

LONGEST_HEADER = 1 << 28
"""The most bytes of JSON that are read into memory, of a file's header and of an index."""

# The fewest bytes for which a progress bar is shown.
_LONG = 1 << 30


Buffer = Callable[[], Tensor]
"""BUFFER bytes on the CPU, which are there from the first call on."""


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


def write(place: Place, chunks: Sequence[Chunk], metadata: dict[str, str], tick: Callable[[int], object]) -> None:
    """Writes the chunks; they are on disk when it returns. tick: called with the number of bytes after each write."""
    chunks = sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize)  # so that every tensor is aligned
    stream = partial(_stream, chunks, buffer())
    sums = [0] * -(-sum(chunk.nbytes for chunk in chunks) // BLOCK)
    for block, some in () if place.mounted else stream():  # no seeking: a pass over the data before the one that writes
        sums[block] = zlib.crc32(some, sums[block])
    with place.write() as file:
        file.write(_header(chunks, metadata, sums))
        for block, some in stream():
            if place.mounted:
                sums[block] = zlib.crc32(some, sums[block])
            file.write(some)
            tick(len(some))
        if place.mounted:  # the header's length was known, and now the checksums in it are
            file.seek(0)
            file.write(_header(chunks, metadata, sums))


def _stream(chunks: Sequence[Chunk], copies: Buffer) -> Iterator[tuple[int, memoryview]]:
    """The bytes of the chunks, at most _CACHED at a time, with the number of the block that they are in."""
    at = 0
    for data in (data for chunk in chunks for values in chunk.values() for data in host_bytes(values, copies)):
        while data:
            some = data[: min(_CACHED, BLOCK - at % BLOCK)]
            yield at // BLOCK, some
            data, at = data[len(some) :], at + len(some)
    assert at == sum(chunk.nbytes for chunk in chunks), "chunks yielded another number of bytes than they announced"


def _header(chunks: Sequence[Chunk], metadata: dict[str, str], sums: Sequence[int]) -> bytes:
    added = {"format": "pt", "block_bytes": str(BLOCK), "block_crc32": "".join(f"{one:08x}" for one in sums)}
    header: dict[str, Any] = {"__metadata__": {**added, **metadata}}
    low = 0
    for chunk in chunks:
        high = low + chunk.nbytes
        header[chunk.key] = {"dtype": NAMES[chunk.dtype], "shape": chunk.shape, "data_offsets": [low, high]}
        low = high
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def buffer() -> Buffer:
    return cache(lambda: torch.empty(BUFFER, dtype=torch.uint8, device="cpu"))


def host_bytes(flat: Tensor, copies: Buffer) -> Iterator[memoryview]:
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
    """The memory of a flat, contiguous tensor on the CPU.

    Not by `numpy()`, after which torch no longer lets the tensor's storage be resized, as FSDP does with shards.
    """
    memory: Any = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat  # lives as long as the memoryview
    return memoryview(memory).cast("B")


class SafeFile(ExitStack):
    """A safetensors file that is open for reading. Raises ValueError where it is damaged or cannot be read.

    expected: the file's `identity` (size and header's checksum) in the index; None if there is no index yet.
    tensors: {key: (dtype, shape, first byte in the data)}.
    metadata: "__metadata__" of the header.
    """

    def __init__(self, place: Place, expected: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.place = place
        with ExitStack() as opened, reading(place):
            self._file: Any = opened.enter_context(place.open())
            self._read_header(expected)
            self.push(opened.pop_all())

    def _read_header(self, expected: dict[str, Any] | None) -> None:
        size = self._file.seek(0, os.SEEK_END)
        if expected is not None and size != expected["bytes"]:
            raise ValueError(f"{self.place} has {size} bytes, not the {expected['bytes']} that were written")
        length = int.from_bytes(self._bytes(0, min(size, 8)), "little")
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{self.place} is no safetensors file, or it is incomplete")
        header = self._bytes(8, length)
        self.identity = {"bytes": size, "header_crc32": zlib.crc32(header)}
        if expected is not None and self.identity != expected:
            raise ValueError(f"{self.place} does not have the header that was written: it was altered")
        self._data = 8 + length
        self._nbytes = size - self._data
        try:
            described = json.loads(header)
            self.metadata: dict[str, str] = described.pop("__metadata__", {})
            self.tensors = {key: self._tensor(one) for key, one in described.items()}
            spans = sorted(one["data_offsets"] for one in described.values())
            # Overlapping tensors could expand a few bytes to more than any memory holds.
            if any(end > start for (_, end), (start, _) in pairwise(spans)):
                raise ValueError("two tensors have the same bytes")
            sums, self._block = self.metadata["block_crc32"], int(self.metadata["block_bytes"])
            self._sums = [int(sums[i : i + 8], 16) for i in range(0, len(sums), 8)]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{self.place} has a header that zero has not written ({error!r})") from None
        if self._block < 1 or len(self._sums) * self._block < self._nbytes:
            raise ValueError(f"{self.place} lacks checksums")

    def _tensor(self, described: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...], int]:
        dtype, shape = DTYPES[described["dtype"]], tuple(int(size) for size in described["shape"])
        low, high = described["data_offsets"]
        if min(shape, default=0) < 0 or not isinstance(low, int) or not isinstance(high, int):
            raise ValueError(f"a tensor of {list(shape)} at {[low, high]}")
        if not 0 <= low <= high <= self._nbytes or high - low != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor of {described['dtype']} {list(shape)} at {[low, high]} of {self._nbytes} bytes")
        return dtype, shape, low

    def check(self, ranges: Sequence[tuple[int, int]], tick: Callable[[int], object]) -> None:
        """Reads every block that the ranges touch, once, and compares its checksum."""
        buffer = torch.empty(_CACHED, dtype=torch.uint8, device="cpu")
        spans = [range(low // self._block, -(-high // self._block)) for low, high in ranges if low < high]
        for number in sorted({number for span in spans for number in span}):
            low, high = number * self._block, min((number + 1) * self._block, self._nbytes)
            found = 0
            for at in range(low, high, _CACHED):
                data = as_bytes(buffer[: min(_CACHED, high - at)])
                self._read_into(data, self._data + at)
                found = zlib.crc32(data, found)
            if found != self._sums[number]:
                at = self._data + low
                raise ValueError(
                    f"{self.place} was altered: bytes {at} to {at + high - low} are not those that were written"
                )
            tick(high - low)

    def read(self, target: Tensor, low: int) -> None:
        """Fills a flat, contiguous tensor on the CPU with the data from byte `low`."""
        self._read_into(as_bytes(target), self._data + low)

    def _bytes(self, at: int, length: int) -> bytes:
        data = bytearray(length)
        self._read_into(memoryview(data), at)
        return bytes(data)

    def _read_into(self, data: memoryview, at: int) -> None:
        while data:
            with reading(self.place):
                self._file.seek(at)
                count = self._file.readinto(data[:AT_A_TIME])
            if count == 0:
                raise ValueError(f"{self.place} ends before byte {at + len(data)}: it is incomplete")
            data, at = data[count:], at + count
