"""A progress bar: on long work, for whoever looks at a terminal, on one rank, where tqdm is installed."""

import fcntl
import io
import os
import pty
import struct
import sys
import termios
from contextlib import contextmanager
from unittest import mock

import pytest
from saved import tiny

import ranks
import zero
from zero.checkpoint import files
from zero.checkpoint.export import export


class Terminal(io.StringIO):
    def isatty(self):
        return True


@contextmanager
def written_to(stream, long=1):
    """What is shown, with work of `long` bytes taken for long work."""
    with mock.patch.object(sys, "stderr", stream), mock.patch.object(files, "_LONG", long):
        yield


def save_and_load(rank, world, path, kind, installed):
    model = zero.FSDP(tiny(300))
    stream = Terminal() if kind == "terminal" else io.StringIO()
    hidden = {} if installed else {"tqdm": None}
    with written_to(stream), mock.patch.dict(sys.modules, hidden):
        zero.checkpoint.save(path, model)
        zero.checkpoint.save(path, model, wait=False).wait()
        zero.checkpoint.load(path, model)
    return stream.getvalue()


def test_on_a_terminal_the_first_rank_shows_it(tmp_path):
    pytest.importorskip("tqdm")
    first, second = ranks.run(save_and_load, 2, (str(tmp_path), "terminal", True))
    assert "saving: 100%" in first and "checking: 100%" in first
    assert second == ""


@pytest.mark.parametrize(("kind", "installed"), [("file", True), ("terminal", False)])
def test_elsewhere_nobody_does(kind, installed, tmp_path):
    assert ranks.run(save_and_load, 2, (str(tmp_path), kind, installed)) == ["", ""]


def test_short_work_has_none(tmp_path):
    stream = Terminal()
    with written_to(stream, long=1 << 30):
        zero.checkpoint.save(tmp_path, tiny())
    assert stream.getvalue() == ""


def test_an_export_has_one(tmp_path):
    pytest.importorskip("tqdm")
    zero.checkpoint.save(tmp_path / "run", tiny())
    stream = Terminal()
    with written_to(stream):
        export(tmp_path / "run", tmp_path / "out")
    assert "exporting: 100%" in stream.getvalue()


def test_a_real_terminal(tmp_path):
    pytest.importorskip("tqdm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(theirs, "w") as stream, written_to(stream):
        zero.checkpoint.save(tmp_path, tiny())
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"saving: 100%" in shown
