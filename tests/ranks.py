"""Runs a function on W ranks, each a process of its own, and brings back what every rank returned.

    def total(rank, world, start):              # at the top level of a test module
        value = torch.tensor(start + rank)
        dist.all_reduce(value)
        return value

    assert ranks.run(total, world=2, args=(10,)) == [21, 21]

A test of which nothing is left to do once the ranks have returned runs on them itself:

    @pytest.mark.parametrize("start", [10, 20])
    @ranks.on(2)
    def test_every_rank_gets_the_total(rank, world, start):
        assert total(rank, world, start) == 2 * start + 1

Rank processes are forked from a server that has torch imported (the tests' own process cannot fork: once it has used
autograd, a forked child hangs in its first backward). They are kept between runs, so that a run costs milliseconds, but
each run gets a process group of its own, and a run that does not succeed costs its processes: they are killed and the
next run starts fresh ones. (Not where every rank was to raise an error, did, and left its group.) What a function
changes in its process (default dtype, patched modules) it must undo, or ask for `fresh=True`.

Warnings on the ranks meet the filters that hold in the calling test.
"""

import atexit
import faulthandler
import gc
import importlib
import inspect
import io
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import reprlib
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import gpus
import mutants

SEED = 0
COLLECTIVE_TIMEOUT = timedelta(seconds=30)  # below a run's default timeout, so that Gloo gets to say whom it waited for
REFUSALS = ("ValueError", "TypeError", "RuntimeError")  # where every rank was to raise it, nothing is under way,
UNDER_WAY = ("out of step", "has stopped")  # but for errors that say this
LONGEST = 90.0  # seconds that a run on GPUs may take, unless it asks for more
GRACE = 5.0  # seconds left to the other ranks once one has failed: they most likely wait for it

# torch imports _dynamo with the first optimizer, which takes longer than all the rest of a rank's start.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "numpy", "pytest"]

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    verdict: str  # "returned", "raised ValueError: ...", "died with exit code ...", "was still running"
    value: Any = None  # what it returned
    detail: str = ""  # its traceback, or its stack where it was stuck
    types: tuple[str, ...] = ()  # names of the class that it raised and of that class's bases
    message: str = ""  # str() of what it raised

    @property
    def returned(self) -> bool:
        return self.verdict == "returned"


class RankError(AssertionError):
    """A run did not end as it should; the message lists what became of every rank."""

    def __init__(self, title: str, outcomes: Sequence[Outcome]) -> None:
        shards = [title]
        for rank, outcome in enumerate(outcomes):
            shards += [f"--- rank {rank} {outcome.verdict}", textwrap.indent(outcome.detail.rstrip(), "    ")]
        super().__init__("\n".join(filter(None, shards)))
        self.outcomes = list(outcomes)


@cache
def start(*more: str) -> None:
    """Starts the fork server without waiting for its imports; the first run would do it too, and wait.

    more: modules that rank processes then have beside `PRELOAD`, for a run of many tests that would each import them.
    """
    preload = [*PRELOAD, *more]
    with suppress(Exception):  # a package that fails to import would take the server down; its own tests say why
        importlib.import_module("zero")
        preload.append("zero")
    _context.set_forkserver_preload(preload)
    multiprocessing.forkserver.ensure_running()


def forked(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Starts a process of its own, in which nothing was done yet but the server's imports. Returns the process."""
    start()
    process = _context.Process(target=fn, args=args)
    process.start()
    return process


def run(
    fn: Callable[..., Any],
    world: int = 2,
    args: tuple[Any, ...] = (),
    timeout: float = 60.0,
    *,
    bare: bool = False,
    fresh: bool = False,
) -> list[Any]:
    """Calls `fn(rank, world, *args)` on every rank of a new group and returns the results by rank: over Gloo, and over
    NCCL for what is on a GPU (gpus.py).

    Tensors in arguments and results arrive as detached copies. With `bare`, one rank runs without any process group;
    with `fresh`, the processes are new ones and used for this run only. Raises RankError where a rank raised, died,
    or did not return within `timeout` seconds; the message holds every rank's traceback, or its stack if stuck.
    """
    __tracebackhide__ = True
    outcomes = _run(fn, world, args, timeout, bare=bare, fresh=fresh)
    if not all(outcome.returned for outcome in outcomes):
        raise RankError(f"{fn.__name__} failed on {len(outcomes)} rank(s)", outcomes)
    return [outcome.value for outcome in outcomes]


def expect_error(
    fn: Callable[..., Any],
    world: int,
    exception: type[BaseException] | str,
    *match: str,
    args: tuple[Any, ...] = (),
    timeout: float = 60.0,
    bare: bool = False,
) -> list[str]:
    """Asserts that every rank raises `exception` with all patterns in its message; returns the messages by rank."""
    __tracebackhide__ = True
    name = exception if isinstance(exception, str) else exception.__name__
    outcomes = _run(fn, world, args, timeout, bare=bare, refused=name if name in REFUSALS else None)
    for outcome in outcomes:
        if name not in outcome.types or not all(re.search(pattern, outcome.message) for pattern in match):
            expected = " and ".join([name, *map(repr, match)])
            raise RankError(f"{fn.__name__} should raise on each of {len(outcomes)} rank(s): {expected}", outcomes)
    return [outcome.message for outcome in outcomes]


def on(world: int | Literal["world"] = 2, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Has a test run on so many ranks, and fail where one of them does. `how`: options of `run`.

    The test's first parameters are `rank` and `world`; what follows is pytest's, and reaches ranks as copies. "world"
    makes the number of ranks a parameter of pytest's, too.
    """
    return lambda test: _on_ranks(test, world, lambda *call, words: run(*call, **how))


def raises(
    world: int | Literal["world"], exception: type[BaseException] | str, *match: str, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """As `on`, for a test that is to raise on every rank. The rest is given to `expect_error`.

    A parameter of the test's by the name of `words` has one more pattern, or several.
    """

    def expecting(fn: Callable[..., Any], number: int, args: tuple[Any, ...], words: Sequence[str]) -> None:
        expect_error(fn, number, exception, *match, *words, args=args, **how)

    return lambda test: _on_ranks(test, world, expecting)


def _on_ranks(
    test: Callable[..., Any], world: int | Literal["world"], called_by: Callable[..., Any]
) -> Callable[..., None]:
    signature = inspect.signature(test)
    rank, number, *own = signature.parameters.values()
    assert (rank.name, number.name) == ("rank", "world"), f"parameters of {test.__name__} before pytest's"

    @wraps(test)
    def outside(**given: Any) -> None:
        __tracebackhide__ = True
        words = given.get("words", ())
        words = [words] if isinstance(words, str) else words
        called_by(outside, given.get("world", world), tuple(given[each.name] for each in own), words=words)

    pytests = [*own, number] if world == "world" else own
    outside.__signature__ = signature.replace(parameters=pytests)  # type: ignore[attr-defined]
    outside.on_rank = test  # type: ignore[attr-defined]
    return outside


def refusal(call: Callable[[], Any]) -> str:
    """What `call` raises, as "ValueError: ..."; nothing if it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Process:
    """One kept rank process, with the pipe to it and the file where it writes its stack."""

    def __init__(self, *, poses: bool) -> None:
        """poses: as a host of its own (gpus.py)."""
        self.stack_file = _scratch(".stack")
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, self.stack_file, poses), daemon=True)
        self.process.start()
        theirs.close()

    def died(self) -> Outcome:
        self.process.join(1)
        return Outcome(f"died with exit code {self.process.exitcode}", detail=self._stack())

    def stuck(self) -> Outcome:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.1)  # the stack is written in the signal handler, frame by frame
        return Outcome("was still running, at", detail=self._stack())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _stack(self) -> str:
        own = (f'"{__file__}"', f"{os.sep}multiprocessing{os.sep}", '"<string>"')
        lines = Path(self.stack_file).read_text().splitlines()
        return "\n".join(line for line in lines if not any(shard in line for shard in own))


_kept: dict[bool, list[_Process]] = {False: [], True: []}
"""By whether they pose as hosts of their own."""


def _run(
    fn: Callable[..., Any],
    world: int,
    args: tuple[Any, ...],
    timeout: float,
    *,
    bare: bool = False,
    fresh: bool = False,
    refused: str | None = None,
) -> list[Outcome]:
    __tracebackhide__ = True
    world = 1 if bare else world
    store = None if bare else (_store().port, f"run {next(_serial)}")
    call = _dumps((fn, args))  # apart from the rest: to be read only once the rank has this process's sys.path
    start()
    poses, timeout = gpus.shared(world), min(timeout * gpus.PATIENCE, max(timeout, LONGEST))
    pool = [] if fresh else _kept[poses]
    new = [_Process(poses=poses) for _ in range(world - len(pool))]
    pool += new
    processes = pool[:world]
    keep = False
    try:
        _answers(new, timeout)  # "ready"
        for rank, process in enumerate(processes):
            process.pipe.send_bytes(_dumps((sys.path, list(warnings.filters), rank, world, store, call)))
        outcomes = _answers(processes, timeout)
        returned = all(outcome.returned for outcome in outcomes)
        under_way = any(words in outcome.message for words in UNDER_WAY for outcome in outcomes)
        if returned or (not under_way and all(refused in outcome.types for outcome in outcomes)):
            # Only now may a rank tear its group down: another could still have been receiving from it.
            for process in processes:
                process.pipe.send_bytes(b"leave")
            left = _answers(processes, timeout if returned else GRACE)
            well = all(outcome.returned for outcome in left)
            keep = well and not fresh
            return outcomes if well or not returned else left
        return outcomes
    finally:  # also where pytest was interrupted
        if not keep:
            for process in processes:
                pool.remove(process)
                process.kill()


def _answers(processes: Sequence[_Process], timeout: float) -> list[Outcome]:
    """The next answer of each process; for those that give none, how they died or where they are stuck."""
    answers: dict[_Process, Outcome] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(processes) and (left := deadline - time.monotonic()) > 0:
        waiting = {process.pipe: process for process in processes if process not in answers}
        for pipe in wait(list(waiting), left):
            process = waiting[pipe]  # type: ignore[index]
            try:
                answers[process] = pickle.loads(process.pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                answers[process] = process.died()
            if not answers[process].returned:
                deadline = min(deadline, time.monotonic() + GRACE)
    return [answers[process] if process in answers else process.stuck() for process in processes]


_serial = itertools.count()


@cache
def _store() -> dist.TCPStore:
    """Where the ranks of all runs find each other. A file in its place is looked at every 10 ms."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _scratch(suffix: str) -> str:
    return str(_scratch_folder() / f"{next(_serial)}{suffix}")


@cache
def _scratch_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="ranks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _serve(pipe: Connection, stack_file: str, poses: bool) -> None:
    mutants.put_in()
    if poses:
        gpus.pose_as_a_host()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends its ranks itself
    threading.Thread(target=_follow_parent, daemon=True).start()
    stack = open(stack_file, "w")  # noqa: SIM115 - the signal handlers write to it as long as the process lives
    for_all = gpus.ON  # for whose backward autograd has a thread of its own
    faulthandler.enable(stack, all_threads=for_all)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=for_all)
    torch.set_num_threads(1)
    if not gpus.ON:
        _leave_devices_unseeded()
    imported = _frozen()
    while True:
        pipe.send_bytes(_dumps(Outcome("returned")))  # ready for the next call
        try:
            call = pipe.recv_bytes()
            pipe.send_bytes(_outcome(call))
            pipe.recv_bytes()  # "leave"
        except (EOFError, ConnectionError):
            os._exit(0)  # not sys.exit: Gloo's threads can abort an interpreter that shuts down
        gc.collect()  # models hold their group in reference cycles
        if dist.is_initialized():
            _leave_group()
        if len(sys.modules) > imported + 50:
            imported = _frozen()


def _leave_devices_unseeded() -> None:
    """Without a GPU torch.manual_seed would note where it was called, to seed GPUs later: 8 ms a call."""
    for devices in (torch.cuda, torch.mtia, torch.xpu):
        devices.manual_seed_all = lambda seed: None


def _leave_group() -> None:
    """Destroys the process group. Gloo takes 10 ms a rank to close its connections: that is left to a thread."""
    groups = [dist.group.WORLD]
    dist.destroy_process_group()
    threading.Thread(target=groups.clear).start()


def _frozen() -> int:
    """What was imported stays, and no collection looks at it again. After transformers that saves 60 ms a run."""
    gc.freeze()
    return len(sys.modules)


def _follow_parent() -> None:
    # The fork server, which is this process's parent for the system, outlives a killed pytest while any rank lives.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _store_at(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _outcome(request: bytes) -> bytes:
    """Runs one call in a new process group; never raises."""
    try:
        path, filters, rank, world, store, call = pickle.loads(request)
        sys.path[:] = path
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters.extend(filters)  # type: ignore[attr-defined]
            gpus.take(rank)
            fn, args = pickle.loads(call)
            torch.manual_seed(SEED)
            if store is not None:
                port, run = store
                dist.init_process_group(
                    gpus.BACKEND,
                    store=dist.PrefixStore(run, _store_at(port)),
                    rank=rank,
                    world_size=world,
                    timeout=COLLECTIVE_TIMEOUT,
                )
            fn = getattr(fn, "on_rank", fn)  # of a test that was marked to run on ranks
            return _dumps(Outcome("returned", fn(rank, world, *args)))
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # the first is this function's own
        text = "".join(traceback.format_exception(type(error), error, frames)) + _seen_by(error)
        types = tuple(base.__name__ for base in type(error).__mro__)
        return _dumps(Outcome(f"raised {types[0]}: {error}", None, text, types, str(error)))


def _seen_by(error: BaseException) -> str:
    """The values where an assertion failed, which pytest tells in its own process only."""
    if not isinstance(error, AssertionError):
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "".join(f"    {name} = {_SHORT.repr(value)}\n" for name, value in frame.f_locals.items())


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 400


class _Pickler(pickle.Pickler):
    """Sends tensors as bytes: not as shared memory, without graph, and of a view no more than it shows. They come to
    the receiver's own GPU if they were on a GPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, value.shape, value.device.type)
        return NotImplemented


def _tensor(data: Any, dtype: torch.dtype, shape: torch.Size, device: str) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape).to(device)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()
