"""A checkpoint that is open for reading: any part of any tensor, checked before it is used.

A part is read directly into its target, or BUFFER bytes at a time where the target is on another device or has another
dtype. A tensor that is stored with its dimensions in another order than the target's, or in other slices, is read full.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint import files
from zero.checkpoint.files import BLOCK, as_bytes, buffer, progress
from zero.checkpoint.format import INDEX, LONGEST, Entry, Index, Part, all_of
from zero.checkpoint.storage import AT_A_TIME, Place, reading


class Source(ExitStack):
    """A checkpoint's index, and its files, which stay open from their first use until the context is left.

    digest: of the index, to be compared between ranks. Raises ValueError where files are damaged or cannot be read.
    """

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
        """Reads a full tensor."""
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
        buffer, found = torch.empty(files.CACHED, dtype=torch.uint8, device="cpu"), 0
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
