"""The scripts of docs/examples for Accelerate and the Trainer, and `accelerate launch`."""

from __future__ import annotations

import contextlib
import io
import random
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

import matrix
import ranks
from launched import launched
from processes import ROOT, python

if find_spec("transformers") is None or find_spec("accelerate") is None:
    pytest.skip("needs transformers and accelerate", allow_module_level=True)

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
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""
WORDS = "a rank holds one shard of each parameter and gathers the others when their module computes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With examples that save every 2 steps in place of 20, and the pages on which they train above them."""
    (tmp_path / "pages" / "examples").mkdir(parents=True)
    (tmp_path / "pages" / "page.md").write_text(" ".join(random.Random(0).choices(WORDS.split(), k=3_000)))
    for name in ("accelerate_train", "trainer_train"):
        source = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
        (tmp_path / "pages" / "examples" / f"{name}.py").write_text(re.sub(r"(% |_steps=)20", r"\g<1>2", source))
    for name, text in {"fsdp.yaml": FSDP, "deepspeed.yaml": DEEPSPEED}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def example(rank: int, world: int, folder: Path, name: str, runs: list[list[str]]) -> list[str]:
    """What rank 0 prints in each run. The model that the last one saved loads."""
    from transformers import GPT2LMHeadModel

    main, printed = runpy.run_path(f"{folder}/pages/examples/{name}.py")["main"], []
    for arguments in runs:
        with launched(rank, world), contextlib.redirect_stdout(io.StringIO()) as told:
            main([*arguments, "--output", f"{folder}/run"])
        printed.append(told.getvalue())
    if rank == 0:
        _, loaded = GPT2LMHeadModel.from_pretrained(f"{folder}/run/model", output_loading_info=True)
        assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate_train", "trainer_train"])
def test_an_example_trains_and_goes_on_at_another_stage(name: str, folder: Path) -> None:
    first = ["--config", f"{folder}/deepspeed.yaml", "--steps", "2"]
    found = ranks.run(example, args=(folder, name, [first, ["--stage", "3", "--resume", "--steps", "4"]]))[0]
    for printed, expected in zip(found, ["ShardedDDP 2", "FSDP 4"], strict=True):
        wrapper, loss, steps = re.findall(r"^(\w+): loss (\S+) after (\d+) steps$", printed, re.MULTILINE)[-1]
        assert f"{wrapper} {steps}" == expected
        assert float(loss) < 5.6  # of bytes that are drawn from all 256 alike it is 5.5


@matrix.only
def test_accelerate_launch_tells_an_example_how_to_shard(folder: Path) -> None:
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "fsdp.yaml"]
    told = python(*launch, "pages/examples/accelerate_train.py", "--steps", 2, cwd=folder, ZERO_LOG="info")
    assert re.search(r"^FSDP: loss \S+ after 2 steps$", told.stdout, re.MULTILINE), told.stdout + told.stderr
    assert re.search(r"FSDP\(GPT2LMHeadModel, .*SHARD_GRAD_OP, 3 units", told.stderr)  # the root and two blocks
