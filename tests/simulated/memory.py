"""Every access to the memory of a device, checked.

An operator runs on the current stream. What it reads must have been written before, by the clocks of the streams, and
what it writes must have been read before by whoever reads it. Freed memory goes to the stream that it was allocated on,
as in torch's caching allocator, and may be what that stream allocates next: all that was done with it must come before,
but for what comes before the free on streams that the memory was recorded on (`record_stream`): the allocator waits for
these.
A storage that was shrunk to nothing cannot be read or written, and once it has room again, not be read until written.

In the memory of the CPU, torch's allocator waits for copies before it uses memory again. Pages that the process has
mapped and pinned itself do not wait: what next lies in them comes after all that was done with them, and the host has
waited for that before they are given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isinf
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from simulated.device import Device, Stream
from zero.shards.sharded_parameter import FullParameter, Shard, ShardedParameter

Accesses = dict[Stream, int]

READS_NOTHING = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
WRITES_ONLY = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "split_with_sizes_copy", "chunk_cat")
NO_ACCESS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "set_", "resize_", "is_pinned")

TO_CPU, FROM_CPU, NUMBERS, AN_OPERATOR = "to the CPU", "from the CPU", "numbers read", "read by an operator on both"


class Race(AssertionError):
    """An access that nothing orders after another."""


class Block:
    """The memory of a storage. home: the stream that it was allocated on; None of what lies in the CPU's memory."""

    def __init__(self, name: str, home: Stream | None, start: int, nbytes: int) -> None:
        self.name, self.home, self.start, self.nbytes = name, home, start, nbytes
        self.writes: Accesses = {}
        self.reads: Accesses = {}
        self.readable = True
        self.recorded: set[Stream] = set()
        self.in_pages = False

    def __repr__(self) -> str:
        return self.name

    def __contains__(self, other: Block) -> bool:
        return self.start <= other.start and other.start + other.nbytes <= self.start + self.nbytes


class Memory(TorchDispatchMode):
    """seconds: what an operator costs, given its arguments, besides what it moves in the device's memory, whose
    bandwidth is in bytes a second. `crossed`: bytes between device and CPU, by how."""

    def __init__(self, device: Device, seconds: Callable[[Any, Sequence[Any]], float], bandwidth: float) -> None:
        super().__init__()
        self._device, self._seconds, self._bandwidth = device, seconds, bandwidth
        self._blocks: dict[ref[torch.UntypedStorage], Block] = {}
        self._freed: dict[Stream, list[Block]] = {}
        self._paused = False
        self._for_host: bool | None = None
        self._peaks: tuple[int, int] | None = None
        self._pages: dict[int, tuple[Accesses, Accesses]] = {}
        self._found: Race | None = None
        self.crossed: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.device.type != "cpu":
                return resize(storage, size)
            block = self._block(storage)
            if block.nbytes:
                self._free(block)
            result = resize(storage, size)
            block.start, block.nbytes, block.readable = storage.data_ptr(), size, False
            if size:
                self._allocate(block)
            return result

        def record(tensor: Tensor, stream: Stream) -> None:
            if self._device.waits_here():
                self._block(tensor.untyped_storage()).recorded.add(stream)

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            mock.patch.object(Tensor, "record_stream", record),
            self,
        ):
            yield
            self._tell()

    @contextmanager
    def made_for_host(self, for_host: bool) -> Iterator[None]:
        """What is allocated in here lies in the memory of the CPU, or (False) of the device."""
        before, self._for_host = self._for_host, for_host
        try:
            yield
        finally:
            self._for_host = before

    def is_in_host_memory(self, tensor: Tensor) -> bool:
        return self._block(tensor.untyped_storage()).home is None

    def on_cpu(self) -> int:
        return sum(block.nbytes for block in {*self._blocks.values()} if block.home is None)

    def on_device(self) -> int:
        return sum(block.nbytes for block in {*self._blocks.values()} if block.home is not None)

    def reset_peaks(self) -> None:
        self._peaks = (0, 0)

    def peaks(self) -> tuple[int, int]:
        """Returns the most bytes on the device, and in the CPU's memory, at any access since `reset_peaks`."""
        assert self._peaks is not None
        return self._peaks

    def access(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float, label: str) -> None:
        """Runs something on the current stream, or, where all is in the CPU's memory, on the host."""
        self._tell()
        read, written = self._blocks_of(reads), self._blocks_of(writes)
        on_host = [block.home is None for block in (*read, *written)]
        stream = self._device.host if on_host and all(on_host) else self._device.current_stream()
        for block in read:
            if not block.readable:
                raise Race(f"{what} on {stream} reads {block.name}, which nobody has written since it was freed")
            self._expect(stream, block.writes, f"{what} reads {block.name}, which {{}} writes")
        for block in written:
            self._expect(stream, block.writes, f"{what} writes {block.name}, which {{}} writes")
            self._expect(stream, block.reads, f"{what} writes {block.name}, which {{}} reads")
        tick = stream.run(seconds, label)
        if self._device.capture is not None:
            for block in (*read, *written):
                self._device.capture.uses(block)
        for block in read:
            block.reads[stream] = tick
        for block in written:
            block.writes, block.reads, block.readable = {stream: tick}, {}, True
        if self._peaks is not None:
            self._peaks = max(self._peaks[0], self.on_device()), max(self._peaks[1], self.on_cpu())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not {*types} <= {Tensor, nn.Parameter, FullParameter, ShardedParameter, Shard, FakeTensor}:
            return NotImplemented  # it has no memory, and takes what is done with it itself
        if self._paused or FakeTensor in types or func.name().startswith("prim::"):
            return func(*args, **kwargs)
        name = func.name().split("::")[1].split(".")[0]
        free = func.is_view or name in NO_ACCESS
        reads, writes = operands(func, args, kwargs)
        if not free and name not in READS_NOTHING:
            self._note(name, reads, writes, args, kwargs, func)
        result = func(*args, **kwargs)
        real = [tensor for tensor in tensors_in(result) if not isinstance(tensor, FakeTensor)]
        made = [tensor for tensor in real if ref(tensor.untyped_storage()) not in self._blocks]
        host = self._for_host is None and bool(reads) and all(map(self.is_in_host_memory, [*reads, *writes]))
        for tensor in made:
            block = self._block(tensor.untyped_storage())
            if host:
                block.home = None
        if name in READS_NOTHING and not all(map(self.is_in_host_memory, made)):
            self._device.launches_one(name)
        if not free and made:
            self.access(name, [], made, self._moving(made), "")
        return result

    def _note(self, name: str, reads: list[Tensor], writes: list[Tensor], args: Any, kwargs: Any, func: Any) -> None:
        waits = name in ("_local_scalar_dense", "equal") and not all(map(self.is_in_host_memory, reads))
        self._count(name, reads, writes, number_is_read=waits)
        if name == "copy_" and self.is_in_host_memory(args[0]) and not self.is_in_host_memory(args[1]):
            if args[1].dim():
                waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            else:  # a number
                reads = []
        overwritten = name in WRITES_ONLY or func._overloadname == "out"
        read = reads if overwritten else [*reads, *writes]
        if not all(map(self.is_in_host_memory, [*reads, *writes])):
            self._device.launches_one(name)
        self.access(name, read, writes, self._seconds(func, args) + self._moving([*read, *writes]), "")
        if waits:
            self._device.host_waits()
            self._device.host.join(self._device.current_stream().clock)

    def _moving(self, tensors: Sequence[Tensor]) -> float:
        there = [] if isinf(self._bandwidth) else [one for one in tensors if not self.is_in_host_memory(one)]
        return sum(tensor.nbytes for tensor in there) / self._bandwidth

    def _count(self, name: str, reads: list[Tensor], writes: list[Tensor], *, number_is_read: bool) -> None:
        """A number in the CPU's memory goes along with a launch."""
        on_host = self.is_in_host_memory
        if number_is_read:
            self.crossed[NUMBERS] += sum(tensor.nbytes for tensor in reads)
        elif name == "copy_":
            if reads[0].dim() and on_host(reads[0]) != on_host(writes[0]):
                self.crossed[TO_CPU if on_host(writes[0]) else FROM_CPU] += reads[0].nbytes
        elif len({on_host(tensor) for tensor in (*reads, *writes) if tensor.dim()}) > 1:
            self.crossed[AN_OPERATOR] += sum(tensor.nbytes for tensor in reads)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in here is noted otherwise."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ---------------------------------------------------------------------------------------------------- blocks

    def _blocks_of(self, tensors: Sequence[Tensor]) -> list[Block]:
        return [self._block(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]

    def _block(self, storage: torch.UntypedStorage) -> Block:
        known = ref(storage, self._died)
        if known not in self._blocks:
            kind = "tensor" if storage.nbytes() else "empty tensor"
            home = None if self._for_host else self._current
            block = Block(f"a {kind} of {storage.nbytes()} bytes", home, storage.data_ptr(), storage.nbytes())
            around = [other for other in self._blocks.values() if block.nbytes and other.nbytes and block in other]
            if not around:
                self._allocate(block)
            self._blocks[known] = around[0] if around else block
        return self._blocks[known]

    @property
    def _current(self) -> Stream:
        return self._device.current_stream()

    def _died(self, known: ref[torch.UntypedStorage]) -> None:
        block = self._blocks.pop(known)
        if block not in self._blocks.values() and block.nbytes:
            self._free(block)

    def pin(self, address: int, nbytes: int, flags: int) -> int:
        """As CUDA's runtime does. Returns no error."""
        self._pages[address] = {}, {}
        return 0

    def lies_in_pages(self, tensor: Tensor) -> None:
        """Called for a tensor in the CPU's memory, which may lie in such pages."""
        block = self._block(tensor.untyped_storage())
        if block.start in self._pages and not block.in_pages:
            block.in_pages, block.readable = True, False
            block.reads, block.writes = self._pages[block.start]

    def give_back(self, address: int) -> None:
        """Pages are pinned no longer. A race is raised at the next access: nobody hears of what a finalizer raises."""
        accesses = self._pages.pop(address, ({}, {}))
        later = [one for each in accesses for one in each.items() if not self._device.host.knows(*one)]
        if later:
            self._found = Race(f"pinned pages are given back, and {later[0][0]} still reads or writes them")

    def _tell(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            raise found

    def _free(self, block: Block) -> None:
        if self._device.capture is not None:
            self._device.capture.frees(block)
        if block.in_pages and block.start in self._pages:
            self._pages[block.start] = block.reads, block.writes
        if block.home is not None:
            freed = Block(block.name, block.home, 0, 0)
            freed.reads, freed.writes = (
                {
                    stream: tick
                    for stream, tick in accesses.items()
                    if not any(recorded.knows(stream, tick) for recorded in block.recorded)
                }
                for accesses in (block.reads, block.writes)
            )
            self._freed.setdefault(block.home, []).append(freed)
        block.reads, block.writes, block.nbytes, block.recorded = {}, {}, 0, set()

    def _allocate(self, block: Block) -> None:
        block.home = None if self._for_host else self._current
        if self._device.capture is not None:
            self._device.capture.makes(block)
        if block.home is None:
            return
        for freed in self._freed.pop(block.home, []):
            told = f"memory of {freed.name}, which is freed, is used for another, and {{}} still"
            self._expect(block.home, freed.writes, f"{told} writes it")
            self._expect(block.home, freed.reads, f"{told} reads it")

    def _expect(self, stream: Stream, accesses: Accesses, told: str) -> None:
        """That what runs on the stream now comes after these."""
        for other, tick in accesses.items():
            if not stream.knows(other, tick):
                raise Race(f"on {stream}, {told.format(other)}: nothing says which comes first")


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for each in value for one in tensors_in(each)] if isinstance(value, (tuple, list)) else []


def operands(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors_in(value))
    return reads, writes
