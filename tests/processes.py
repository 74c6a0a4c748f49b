"""Python as users start it, in a process of its own; and `python -m` in that of the tests."""

import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import mutants
import ranks

ROOT = Path(__file__).parents[1]


@contextmanager
def within(folder: str | Path) -> Iterator[None]:
    """In that folder. As contextlib.chdir, which Python 3.10 lacks."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def python(
    *arguments: object, cwd: Path | None = None, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` writes, which imports this checkout. Fails with what it wrote if it exits otherwise than
    with `code`. The process is forked where torch is imported already (ranks.py), for which a new one takes seconds.
    """
    given = [*map(str, arguments)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        process = ranks.forked(_as_python, (given, str(cwd or Path.cwd()), environment, files))
        process.join(110)
        process.kill()
        process.join()
        written = [file.seek(0) or file.read() for file in (out, err)]
    assert process.exitcode == code, "".join(written)
    return subprocess.CompletedProcess(given, code, *written)


def _as_python(arguments: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> None:
    os.environ.update({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment})
    os.chdir(cwd)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.split(".")[0] == "zero"]:
        del sys.modules[name]  # to be imported with these settings
    mutants.put_in()
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    try:
        _run(arguments)
    except Exception:
        sys.exit(traceback.format_exc())


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _execute_child(popen: Any, args: Any, *rest: Any) -> None:
    """What Popen starts a process by, such as torchrun its ranks: Python is forked here, too."""
    if isinstance(args, str) or args[0] != sys.executable:
        return _execute(popen, args, *rest)
    _, _, _, _, cwd, env, *_, start_new_session, _ = rest
    pipes = rest[9:15]  # to and from the process, and its errors
    popen.pid = os.fork()
    if not popen.pid:
        code: object = 0
        try:
            if start_new_session:
                os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            for number, file in enumerate(pipes[3::2], 1):
                if file != -1:
                    os.dup2(file, number)
            os.environ.clear()
            _as_python(list(args[1:]), cwd or os.getcwd(), env or {}, [])
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else traceback.format_exc()
        os._exit(_left(code))
    popen._child_created = True
    popen._close_pipe_fds(*pipes)
    return None


def _left(code: object) -> int:
    """Ends as the interpreter does. Returns the exit code."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    multiprocessing.util._exit_function()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _run(arguments: list[str]) -> None:
    while arguments[0] in ("-W", "-u"):
        if arguments.pop(0) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    first, *rest = arguments
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    if first in ("-m", "-c"):
        name, *rest = rest
        sys.path[:0] = [os.getcwd(), *paths]
        sys.argv = [first, *rest]
        if first == "-c":
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [os.path.dirname(os.path.abspath(first)), *paths]
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def command(package: str, *arguments: object) -> object:
    """What the command exits with: 0 or None where all is well, a number, or a text for the terminal."""
    sys.modules.pop(f"{package}.__main__", None)
    with mock.patch.object(sys, "argv", [package, *map(str, arguments)]):
        try:
            runpy.run_module(package, run_name="__main__")
        except SystemExit as done:
            return done.code
    return 0
