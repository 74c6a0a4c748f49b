"""A progress bar: on long work, for whoever looks at a terminal, on one rank, where tqdm is installed."""

import io
import sys
from unittest import mock

import pytest
from saved import tiny

import ranks
import zero
from commands import command
from inner import progress_from


class Terminal(io.StringIO):
    def isatty(self):
        return True


def save_and_load(rank, world, path, stream, hidden, long):
    """What is shown, with work of `long` bytes taken for long work."""
    model = zero.FSDP(tiny(300)) if world > 1 else tiny(300)
    shown, missing = stream(), dict.fromkeys(hidden)
    with mock.patch.object(sys, "stderr", shown), mock.patch.dict(sys.modules, missing), progress_from(long):
        zero.checkpoint.save(path, model)
        zero.checkpoint.save(path, model, wait=False).wait()
        zero.checkpoint.load(path, model)
    return shown.getvalue()


def test_a_bar_is_shown_of_long_work_on_a_terminal_by_the_first_rank(tmp_path):
    pytest.importorskip("tqdm")
    first, second = ranks.run(save_and_load, 2, (str(tmp_path), Terminal, (), 1))
    assert "saving: 100%" in first and "checking: 100%" in first and second == ""
    for stream, hidden, long in [(io.StringIO, (), 1), (Terminal, ("tqdm",), 1), (Terminal, (), 1 << 30)]:
        assert ranks.run(save_and_load, 1, (str(tmp_path), stream, hidden, long), bare=True) == [""]
    with mock.patch.object(sys, "stderr", Terminal()) as shown, progress_from(1):
        command("zero.checkpoint", "export", tmp_path, tmp_path / "out")
    assert "exporting: 100%" in shown.getvalue()
