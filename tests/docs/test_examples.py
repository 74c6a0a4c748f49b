"""The scripts of docs/examples on one process and on two ranks, and what README.md shows of them.

Those of resume.py that fail are in tests/faults, that of Lightning is in tests/integrations.
"""

import contextlib
import difflib
import io
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import README, ROOT

import matrix
import ranks
import zero
from examples import EXAMPLES, run_example
from launched import launched
from processes import python, within

DDP, MOVED = (EXAMPLES / f"{name}.py" for name in ("ddp", "moved"))

with_peft = pytest.mark.skipif(not all(map(find_spec, ("transformers", "peft"))), reason="needs transformers and peft")
with_accelerate = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate"))), reason="needs transformers and accelerate"
)
with_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")


def script(rank: int, world: int, folder: Path, name: str, written: str = "", instead: str = "") -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told, within(folder):
        run_example(name, written=written, instead=instead)
    return told.getvalue()


def run(world: int, folder: Path, name: str, *replaced: str) -> list[str]:
    """By rank. One process has no process group."""
    return ranks.run(script, world, (folder, name, *replaced), bare=world == 1)


def loaded(file: Path) -> dict[str, torch.Tensor]:
    return torch.load(file, weights_only=True)


def test_the_diff_of_the_readme_is_that_of_the_scripts():
    before, after = (path.read_text().splitlines(keepends=True) for path in (DDP, MOVED))
    shown = re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert shown == ["".join(difflib.unified_diff(before, after, "ddp.py", "moved.py", n=1))]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_moved_script_trains_to_what_ddp_does_at_every_stage(world, tmp_path):
    told, expected = run(world, tmp_path, "ddp"), loaded(tmp_path / "weights.pt")
    assert float(told[0].split()[1]) < 0.7  # 1.0 at first
    for stage in range(4):
        assert run(world, tmp_path, "moved", "stage=3", f"stage={stage}") == told
        torch.testing.assert_close(loaded(tmp_path / "weights.pt"), expected, rtol=1e-5, atol=1e-6)


WHOLE, WHOLE_MOVED = (EXAMPLES / f"{name}.py" for name in ("whole_script", "whole_script_moved"))


def test_six_lines_of_a_whole_script_change_and_the_page_shows_them():
    before, after = (path.read_text().splitlines(keepends=True) for path in (WHOLE, WHOLE_MOVED))
    changed = [line for line in difflib.unified_diff(before, after, n=0) if line[0] in "+-" and line[1:].strip()][2:]
    assert len(before) > 80 and sum(line[0] == "+" for line in changed) <= 6, changed
    page = (ROOT / "docs" / "move_a_script.md").read_text()
    assert re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.MULTILINE) == ["".join(changed)]


def in_two_runs(rank: int, world: int, folder: Path, arguments: list[str], stage: int | None) -> tuple[str, list[Any]]:
    """What the script prints that ends after two epochs, and goes on for two more; and the averages. stage: None for
    DistributedDataParallel."""
    folder.mkdir(exist_ok=True)
    name, written, instead = ("whole_script_moved", "stage=3", f"stage={stage}")
    if stage is None:
        name, written, instead = "whole_script", "", ""
    with contextlib.redirect_stdout(io.StringIO()) as told, within(folder):
        for epochs in (2, 4):
            names = run_example(name, "--epochs", epochs, *arguments, written=written, instead=instead)
    average = names["average"]
    if stage is None:
        return told.getvalue(), [param.detach() for param in average.module.parameters()]
    with average.swapped():
        return told.getvalue(), [*zero.full_state_dict(names["model"], to=None).values()]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--fp16"], ["--accumulate", "1"]], ids=" ".join)
def test_the_whole_script_prints_the_same_numbers_at_every_stage(arguments, tmp_path):
    (told, average), _ = ranks.run(in_two_runs, 2, (tmp_path / "ddp", arguments, None))
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", told)]
    assert told.count("8608 parameters") == 2 and len(losses) == 4 and losses[3] < 0.6 * losses[0]
    for stage in range(4):
        (found, own), _ = ranks.run(in_two_runs, 2, (tmp_path / str(stage), arguments, stage))
        assert found == told
        torch.testing.assert_close(own, average, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("name", "below"), [("offload", 0.9), ("muon", 5.2)])
def test_a_script_trains(name, below, world, tmp_path):
    for told in run(world, tmp_path, name):
        assert float(told.split()[1]) < below


def logged(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """What TensorBoard's files have, by its name: steps, and numbers or histograms."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()  # 0: all
    names = events.Tags()
    found = {name: [(one.step, one.value) for one in events.Scalars(name)] for name in names["scalars"]}
    return found | {
        name: [(one.step, one.histogram_value) for one in events.Histograms(name)] for name in names["histograms"]
    }


@pytest.mark.slow
@with_tensorboard
@pytest.mark.parametrize("world", [1, 2])
def test_numbers_and_histograms_are_logged_alike_at_every_stage(world, tmp_path):
    found = []
    for stage in range(4):
        told = run(world, tmp_path, "log_to_tensorboard", "3, 200, 10", f"{stage}, 41, 20")
        assert [*map(bool, told)] == [True, False][:world]
        assert len([*(tmp_path / "runs" / f"stage {stage}").iterdir()]) == 1
        found.append(logged(tmp_path / "runs" / f"stage {stage}"))
    plain, *others = found
    for one in others:
        assert one.keys() == plain.keys()
        for name in plain:
            if name == "gradient norm":
                assert one[name] == [(step, pytest.approx(norm, rel=1e-6)) for step, norm in plain[name]]
            elif not name.startswith("zero/"):
                assert one[name] == plain[name], name
    losses, kept = dict(plain["loss"]), [dict(one["zero/resident_bytes"])[40] for one in found]
    assert sorted(losses) == [0, 20, 40] and losses[40] < 0.7 * losses[0]
    assert kept == sorted(kept, reverse=True) and (kept[3] < 0.51 * kept[0] or world == 1)
    histograms = {name: [one.num for _, one in plain[name]] for name in plain if ".weight" in name}
    numels = {"0": 32 * 128, "2": 128 * 128, "4": 128 * 32}
    kinds = ("weights", "gradients")
    assert histograms == {f"{kind}/{layer}.weight": [numel] * 3 for kind in kinds for layer, numel in numels.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_files_that_plain_pytorch_takes_are_written(world, tmp_path):
    run(world, tmp_path, "weights")
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    net.load_state_dict(loaded(tmp_path / "weights.pt"))
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(loaded(tmp_path / "optimizer.pt"))
    assert optimizer.state[net[0].weight]["step"] == 20
    before = loaded(tmp_path / "start.pt")
    assert all(0 < (param - before[name]).abs().max() < 0.1 for name, param in net.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_script_goes_on_where_it_ended(world, tmp_path):
    ranks.run(trained, world, (tmp_path / "parts", 10), fresh=True)
    found = ranks.run(trained, world, (tmp_path / "parts", 20), fresh=True)
    assert [len(weights) for weights in found] == [4, 0][:world]


def trained(rank: int, world: int, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    with contextlib.redirect_stdout(io.StringIO()):
        model = run_example("resume", folder, written="1000", instead=str(steps))["model"]
    return zero.full_state_dict(model, to=0)


@pytest.mark.slow
def test_a_plan_is_made_of_a_model_without_memory(tmp_path):
    (told,) = run(1, tmp_path, "plan", "num_layers=8", "num_layers=2")
    assert re.search(r"^ +8 +3 kept ", told, re.MULTILINE) and "8 ranks: stage 0 (DDP)" in told, told


@pytest.mark.slow
@with_peft
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("world", [1, 2])
def test_the_adapter_alone_is_saved_and_loads(world, tmp_path):
    from safetensors.torch import load_file

    found = []
    for stage in (0, 3):
        assert float(run(world, tmp_path, "lora", "stage=3", f"stage={stage}")[0].split()[1]) < 5.6
        found.append(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert {name.split(".")[-2] for name in found[0]} == {"lora_A", "lora_B"}
    assert any(value.any() for name, value in found[0].items() if "lora_B" in name)
    # As the page says: weights and two moments.
    index = json.loads((tmp_path / "run" / "00000002" / "index.json").read_text())
    stored = sum(4 * math.prod(entry["shape"]) for entry in index["tensors"].values())
    assert stored == 12 * sum(value.numel() for value in found[0].values()) == 12_288
    assert stored + 4 * sum(math.prod(entry["shape"]) for entry in index["left_out"].values()) == 278_016
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2), (2, 3)])
def test_from_pretrained_loads_what_a_run_is_exported_to(world, stage, tmp_path):
    told = run(world, tmp_path, "pretrained", "stage=3", f"stage={stage}")[0].splitlines()[-1]
    trained, exported = map(float, re.findall(r"\d\.\d+", told))
    assert trained == pytest.approx(exported, rel=1e-5) and trained < 4.5  # of bytes that are drawn alike 5.5
    assert {"config.json", "model.safetensors"} <= {one.name for one in (tmp_path / "out").iterdir()}


# As `accelerate config` writes them.
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
mixed_precision: 'no'
main_process_port: 0
num_machines: 1
num_processes: 2
rdzv_backend: static
"""


def by_accelerate(rank: int, world: int, folder: Path, name: str) -> list[str]:
    """What rank 0 prints at stage 2, and as it goes on at stage 3; the saved model loads."""
    from transformers import GPT2LMHeadModel

    printed = []
    for stage, last in ((2, 10), (3, 20)):
        shorter = {"written": "max_steps=20", "instead": f"max_steps={last}"} if name == "trainer_train" else {}
        quiet = contextlib.redirect_stdout(io.StringIO())
        with launched(rank, world), within(folder), quiet as told:
            run_example(name, stage, **shorter)
        printed.append(told.getvalue())
    if rank == 0:
        _, loading = GPT2LMHeadModel.from_pretrained(f"{folder}/run/model", output_loading_info=True)
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return printed


@pytest.mark.slow
@with_accelerate
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["accelerate_train", "trainer_train"])
def test_an_example_trains_and_goes_on_at_another_stage(name, world, tmp_path):
    found = ranks.run(by_accelerate, world, (tmp_path, name), timeout=100)[0]
    losses = []
    for printed, expected in zip(found, ["ShardedDDP", "FSDP"], strict=True):
        wrapper, loss = re.findall(r"^(\w+): loss (\S+)$", printed, re.MULTILINE)[-1]
        assert wrapper == expected
        losses.append(float(loss))
    assert losses[1] < losses[0] < 5.2  # of bytes that are drawn from all 256 alike it is 5.5


@matrix.only
@with_accelerate
def test_accelerate_launch_tells_an_example_how_to_shard(tmp_path):
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "fsdp.yaml"]
    told = python(*launch, EXAMPLES / "accelerate_train.py", cwd=tmp_path, ZERO_LOG="info")
    assert re.search(r"^FSDP: loss \S+$", told.stdout, re.MULTILINE), told.stdout + told.stderr
    assert re.search(r"FSDP\(GPT2LMHeadModel, .*SHARD_GRAD_OP\) of 3 units", told.stderr)  # the root and two blocks


@matrix.only
def test_the_picture_of_the_readme_is_that_of_the_plan(tmp_path):
    drawing, picture = (ROOT / "docs" / "measured" / f"memory_7b.{kind}" for kind in ("py", "svg"))
    (tmp_path / drawing.name).write_text(drawing.read_text())
    python(tmp_path / drawing.name)
    assert (tmp_path / picture.name).read_text() == picture.read_text()
