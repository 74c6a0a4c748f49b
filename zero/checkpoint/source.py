"""A checkpoint that is open for reading: any range of any tensor, checked before it is used.

A range is read directly into its target, or BUFFER bytes at a time where the target is on another device or has another
dtype. A tensor that is stored with its dimensions in another order than the target's is read full.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from zero.checkpoint.files import BUFFER, LONGEST_HEADER, FileProblem, SafeFile
from zero.checkpoint.format import INDEX, Entry, Geometry, Index
from zero.checkpoint.progress import Progress
from zero.checkpoint.storage import Place


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a stored tensor, counted in the order of `wanted`."""

    entry: Entry
    wanted: Geometry
    start: int
    stop: int

    @property
    def in_order(self) -> bool:
        return self.wanted.order == self.entry.geometry.order


class Source:
    """A checkpoint's index, and its files, which stay open from their first use until the context is left.

    digest: of the index, to be compared between ranks. Raises FileProblem where files are damaged or cannot be read.
    """

    def __init__(self, directory: Place) -> None:
        self.directory = directory
        try:
            text = _bytes_of(directory / INDEX)
            self.digest = hashlib.sha256(text).hexdigest()
            self.index = Index.loads(text.decode())
        except OSError as error:
            raise FileProblem(f"{directory / INDEX} cannot be read ({error.strerror or error})") from None
        except ValueError as error:
            raise FileProblem(f"{directory / INDEX} {error}") from None
        self._stack = ExitStack()
        self._files: dict[str, SafeFile] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._files.clear()
        self._buffer = self._buffer.new_empty(0)

    def check(self, ranges: Iterable[Range], *, shown: bool = False) -> None:
        """Reads the blocks of the ranges and compares their checksums. shown: show progress."""
        needed: dict[str, list[tuple[int, int]]] = {}
        for one in ranges:
            for name, low, high, _ in self._places(one if one.in_order else _all_of(one)):
                needed.setdefault(name, []).append((low, high))
        nbytes = sum(high - low for places in needed.values() for low, high in places)
        with Progress("checking", nbytes, shown) as progress:
            for name, places in sorted(needed.items()):
                self._files[name].check(places, progress.advance)

    def fill(self, target: Tensor, one: Range) -> None:
        """Reads a range into a flat tensor of as many elements, and converts to its dtype."""
        stored = one.entry.geometry
        if not one.in_order:
            flat = torch.empty(stored.numel, dtype=stored.dtype, device="cpu")
            self.fill(flat, _all_of(one))
            target.copy_(one.wanted.flat(stored.shaped(flat))[one.start : one.stop])
            return
        for name, low, high, at in self._places(one):
            count = (high - low) // stored.dtype.itemsize
            self._fill(target[at : at + count], stored.dtype, self._files[name], low)

    def stream(self, entry: Entry) -> Iterator[Tensor]:
        """Yields a full tensor, row-major and flat, a buffer at a time; each is valid until the next."""
        stored = entry.geometry
        full = Range(entry, replace(stored, order=None), 0, stored.numel)
        if not full.in_order:
            flat = torch.empty(stored.numel, dtype=stored.dtype, device="cpu")
            self.fill(flat, full)
            yield flat
            return
        for name, low, high, _ in self._places(full):
            for at in range(low, high, BUFFER):
                data = self._read_buffer()[: min(BUFFER, high - at)]
                self._files[name].read(data, at)
                yield data.view(stored.dtype)

    def _fill(self, target: Tensor, dtype: torch.dtype, file: SafeFile, low: int) -> None:
        if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            file.read(target, low)
            return
        step = BUFFER // dtype.itemsize
        for first in range(0, target.numel(), step):
            section = target[first : first + step]
            data = self._read_buffer()[: section.numel() * dtype.itemsize]
            file.read(data, low + first * dtype.itemsize)
            section.copy_(data.view(dtype))

    def _places(self, one: Range) -> Iterator[tuple[str, int, int, int]]:
        """Where a range is stored: file, first byte, end byte, and the element of the range at the first byte."""
        for shard in one.entry.shards:
            start, stop = max(shard.start, one.start), min(shard.stop, one.stop)
            if start < stop:
                file = self._open(shard.file)
                dtype, shape, _ = file.tensors.get(shard.key, (None, (), 0))
                if dtype != one.entry.geometry.dtype or math.prod(shape) != shard.stop - shard.start:
                    raise FileProblem(f"{file.place} has no {shard.key} of the dtype and size that {INDEX} names")
                low, high = file.range(shard.key, start - shard.start, stop - shard.start)
                yield shard.file, low, high, start - one.start

    def _open(self, name: str) -> SafeFile:
        if name not in self._files:
            expected = self.index.files.get(name)
            if expected is None or "/" in name or name == "..":
                raise FileProblem(f"{self.directory / INDEX} names {name!r}, which is none of its files")
            self._files[name] = self._stack.enter_context(SafeFile(self.directory / name, expected))
        return self._files[name]

    def _read_buffer(self) -> Tensor:
        if not len(self._buffer):
            self._buffer = torch.empty(BUFFER, dtype=torch.uint8, device="cpu")
        return self._buffer


def _bytes_of(place: Place) -> bytes:
    """Raises FileProblem where it is longer than any index."""
    reader = place.open()
    try:
        size = reader.size
    finally:
        reader.close()
    if size > LONGEST_HEADER:
        raise FileProblem(f"{place} has {size} bytes, more than the {LONGEST_HEADER} that an index may have")
    return place.read()


def _all_of(one: Range) -> Range:
    return Range(one.entry, one.entry.geometry, 0, one.entry.geometry.numel)
