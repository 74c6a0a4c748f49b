"""Reading another process's memory: all of it or an error, and who is permitted to."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from zero.comm import host_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a system call of Linux")


def test_bytes_are_copied_from_any_address_of_a_process():
    source, target = ctypes.create_string_buffer(b"some bytes"), ctypes.create_string_buffer(11)
    host_memory.read_memory(os.getpid(), ctypes.addressof(source) + 5, ctypes.addressof(target), 5)
    assert target.raw == b"bytes" + bytes(6)


def test_what_ends_before_all_is_read_is_an_error():
    target = ctypes.create_string_buffer(3 * mmap.PAGESIZE)
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        mapped = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(mapped)
        ctypes.CDLL(None).munmap(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE)
        with pytest.raises(OSError, match="Bad address"):
            host_memory.read_memory(os.getpid(), start, ctypes.addressof(target), 2 * mmap.PAGESIZE)
        del mapped


def test_a_process_that_has_ended_is_an_error():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    target = ctypes.create_string_buffer(8)
    with pytest.raises(OSError, match="No such process"):
        host_memory.read_memory(ended.pid, ctypes.addressof(target), ctypes.addressof(target), 8)


@pytest.mark.parametrize(
    ("scope", "parent", "permitted"), [("1", 1234, [1234]), ("1", 1, []), ("0", 1234, []), ("2", 1234, [])]
)
def test_siblings_are_permitted_only_where_yama_forbids_them_and_the_parent_is_a_launcher(scope, parent, permitted):
    with (
        mock.patch.object(Path, "exists", return_value=True),
        mock.patch.object(Path, "read_text", return_value=f"{scope}\n"),
        mock.patch.object(os, "getppid", return_value=parent),
        mock.patch.object(host_memory, "_libc") as libc,
    ):
        host_memory.permit_siblings()
    assert [call.args[1].value for call in libc().prctl.call_args_list] == permitted
