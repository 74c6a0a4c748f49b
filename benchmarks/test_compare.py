"""What the benchmarks report: a regression is found, and tables say what was measured."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ranks
from processes import python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def write(file: Path, milliseconds: dict[str, float], cpu: str = "one") -> Path:
    benchmarks = [{"fullname": name, "stats": {"median": time / 1000}} for name, time in milliseconds.items()]
    file.write_text(json.dumps({"machine_info": {"cpu": {"brand_raw": cpu}}, "benchmarks": benchmarks}))
    return file


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_ten_percent_more_is_no_regression(tmp_path):
    before = write(tmp_path / "before.json", {"step": 100.0, "clip": 2.0})
    after = write(tmp_path / "after.json", {"step": 109.9, "clip": 1.0, "save": 5.0})
    done = compare(before, after)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()[2:]] == [
        ["benchmark", "before", "after", "ratio"],
        ["step", "100.00", "109.90", "1.10"],
        ["clip", "2.00", "1.00", "0.50"],
        ["save", "-", "5.00", "new"],
    ]


@pytest.mark.parametrize("found", [{"step": 110.1, "clip": 2.0}, {"clip": 2.0}])
def test_more_than_that_is_and_so_is_a_benchmark_that_is_gone(tmp_path, found):
    before = write(tmp_path / "before.json", {"step": 100.0, "clip": 2.0})
    done = compare(before, write(tmp_path / "after.json", found))
    assert done.returncode == 1
    assert "REGRESSION" in done.stdout
    assert done.stderr.strip() == "FAILED: over 10% more CPU time, or gone: step"
    assert compare(before, tmp_path / "after.json", "--over", 20).returncode == (0 if "step" in found else 1)


def test_another_machine_is_named(tmp_path):
    before = write(tmp_path / "before.json", {"step": 1.0})
    done = compare(before, write(tmp_path / "after.json", {"step": 1.0}, cpu="two"))
    assert "Not the same machine: one before, two after" in done.stdout


def test_another_file_is_refused(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert compare(other, other).returncode == 2


def test_ratios_of_peers_are_those_of_turns_next_to_one_another(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import comparison

    def result(variant: str, stage: str, cpu: list[float], process: int) -> comparison.Result:
        return comparison.Result(variant, variant.upper(), stage, cpu, cpu, 2**20, process * 2**20, [1.5])

    plain = result("ddp", "0", [100.0, 200.0, 100.0], 9)
    slow, fast = result("fsdp2", "3", [90.0, 190.0, 90.0], 8), result("fsdp1", "3", [80.0, 160.0, 81.0], 7)
    ours = result("zero3", "3", [50.0, 100.0, 50.0], 6)
    results = [plain, slow, fast, ours]
    cells = [line.split() for line in comparison.table(results).splitlines()]
    assert cells[-1] == ["ZERO3", "50.0", "50.0", "0.50", "0.50", "0.62", "1.0", "6", "1.5000"]
    assert cells[3][5] == "1.00"
    told = [line.split() for line in comparison.goals({"gpt": results}).splitlines()]
    assert ["ZERO3", "FSDP2", "gpt", "CPU", "ms", "0.556", "0.60", "met"] in told
    assert ["ZERO3", "FSDP2", "gpt", "step", "ms", "0.556", "0.60", "met"] in told
    assert ["ZERO3", "FSDP1", "gpt", "process", "0.857", "1.00", "met"] in told
    assert "missed" in comparison.goals({"tiny": results})


def test_one_rank_of_a_large_world_is_run_alone():
    done = python(BENCHMARKS / "gpu.py", "--world", 64, "--task", "one", "--steps", 1, "--variants", "zero3")
    assert "one rank of 64, one" in done.stdout
    assert "zero stage 3" in done.stdout


def run_wires(rank: int, world: int, arguments: list[str]) -> None:
    """The script, whose rank is this process and no fresh one."""
    sys.path.insert(0, str(BENCHMARKS))
    import launch
    import wires

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    here = launch.Rank(2, 4, torch.device("cpu"), tick=lambda: None)
    with (
        mock.patch.object(wires, "run_one_of", lambda work, world: work(here)),
        mock.patch.object(sys, "argv", ["wires.py", "--world", "4", *arguments]),
        contextlib.redirect_stdout(None),
    ):
        wires.main()


def test_wires_take_as_long_as_their_bytes_at_the_bandwidth(tmp_path):
    pytest.importorskip("matplotlib")
    size = "--layers 1 --width 32 --tokens 128 --gpus-a-host 2 --nics 1 --bandwidth 0.1 --steps 1 --rounds 1"
    ranks.run(run_wires, 1, ([*size.split(), "--out", str(tmp_path)],), bare=True, fresh=True)
    written = json.loads((tmp_path / "wires.json").read_text())
    [parameters] = re.findall(r"GPT of ([\d,]+) parameters", written["subject"])
    ms_a_byte = int(parameters.replace(",", "")) * 3 / 4 / 0.1e9 * 1000  # of each element, to a rank of 4
    took = {title: rounds[0]["wire_ms"] / ms_a_byte for title, rounds in written["contestants"].items()}
    assert took.pop("nothing sharded") == 0
    assert took.pop("zero stage 2") == pytest.approx(4 + 2, rel=0.05)  # gradients in float32, parameters in 16 bits
    assert [*took] == ["FSDP1", "FSDP2", "zero stage 3"]
    for title, of_title in took.items():  # gradients in 32 bits, parameters once or twice
        assert 4 + 2 <= of_title <= 4.2 + 2 * 2, title
    assert (tmp_path / "wires.png").exists()


def run_offload(rank: int, world: int, folder: str) -> dict[str, dict[str, float]]:
    """The script, whose rank is this process, and one step of each that a GPU would train."""
    sys.path.insert(0, str(BENCHMARKS))
    import launch
    import offload
    import offloaded

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    here = launch.Rank(0, 1, torch.device("cpu"), tick=lambda: None)
    command = f"offload.py --parameters 3e3 --threads 1 --turns 2 --out {folder}"
    with (
        mock.patch.object(offload, "run_ranks", lambda work, world: [work(here)]),
        mock.patch.object(sys, "argv", command.split()),
        contextlib.redirect_stdout(None),
        contextlib.suppress(SystemExit),  # it may be slow
    ):
        offload.main()
    settings = offloaded.Settings(
        1, 0.0, tokens=128, layers=1, width=32, compile=False, reduce_dtype="float32", steps=1
    )
    with offloaded.Crossings() as crossed:
        torch.ones(4).to("meta").copy_(torch.ones(4))
    assert (crossed.down, crossed.up) == (0, 32)
    return {title: offloaded.measure_training(title, settings, here) for title in offloaded.CONTESTANTS}


def test_the_step_of_offloaded_shards_is_measured_beside_a_copy(tmp_path):
    [trained] = ranks.run(run_offload, 1, (str(tmp_path),), bare=True, fresh=True)
    written = json.loads((tmp_path / "offload.json").read_text())
    assert [*written["steps"]] == ["copy", "torch's fused AdamW", "zero, with casts", "zero, float32 gradients"]
    for title, taken in written["taken_ms"].items():
        assert len(taken) == 2 and written["steps"][title]["ms"] > 0
    assert written["steps"]["copy"]["to_copy"] == 1
    assert "training" not in written
    assert [*trained] == ["FSDP2", "stage 1", "stage 2", "stage 3"]
    assert all(found["down"] == found["up"] == 0 < found["backward_ms"] for found in trained.values())


def test_results_go_where_git_ignores_them():
    ignored = (BENCHMARKS.parent / ".gitignore").read_text().splitlines()
    assert "/benchmarks/out/" in ignored
    assert not any(line.startswith("!") for line in ignored)
    for script in ("stages.py", "peers.py", "wires.py", "offload.py"):
        assert 'OUT = Path(__file__).parent / "out"' in (BENCHMARKS / script).read_text()


def test_the_checks_that_a_benchmark_takes_away_are_there_and_come_back(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(BENCHMARKS)
    checks = importlib.import_module("checks")

    def found():
        return [getattr(holder, name) for holder, name, _ in checks.PATCHES]

    before = found()
    with checks.without_checks():
        assert not any(one is other for one, other in zip(found(), before, strict=True))
    with checks.counting():
        assert found() != before
    assert found() == before
