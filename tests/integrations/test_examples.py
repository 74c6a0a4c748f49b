"""The scripts of docs/examples for Accelerate and the Trainer, and `accelerate launch`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import ranks
from launched import launched
from processes import ROOT, python

if find_spec("accelerate") is None:
    pytest.skip("needs accelerate", allow_module_level=True)

# As `accelerate config` writes them.
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: DecoderBlock
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
  offload_optimizer_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""
SCRIPT = """
import sys

import torch
from zoo import CONTEXT, GPT, VOCABULARY

from zero.integrations.accelerate import Accelerator, ZeroPlugin


def train(accelerator):
    torch.manual_seed(0)
    model = GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens = torch.randint(VOCABULARY, (2, CONTEXT))
    losses = []
    for _ in range(2 * accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if accelerator.is_main_process:
        plugin, steps = accelerator.zero_plugin, accelerator.gradient_accumulation_steps
        print("TRAINED", type(model).__name__, plugin.sharding_strategy, steps, losses[-1] < losses[0])


train(Accelerator(cpu=True))
train(Accelerator(cpu=True, zero_plugin=ZeroPlugin.from_yaml(sys.argv[1])))
"""


@pytest.mark.slow
def test_accelerate_launch_with_fsdp_config_and_a_file_for_deepspeed(tmp_path: Path) -> None:
    for name, text in {"fsdp.yaml": FSDP, "deepspeed.yaml": DEEPSPEED, "train.py": SCRIPT}.items():
        (tmp_path / name).write_text(text)
    launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "fsdp.yaml"]
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    result = python(*launch, "train.py", "deepspeed.yaml", cwd=tmp_path, PYTHONPATH=paths, ZERO_LOG="info")
    trained = re.findall("^TRAINED (.*)$", result.stdout, re.MULTILINE)
    assert trained == ["FSDP SHARD_GRAD_OP 1 True", "ShardedDDP FULL_SHARD 2 True"], result.stdout + result.stderr
    assert re.search(r"FSDP\(GPT, .*SHARD_GRAD_OP, 4 units", result.stderr)  # the root and three blocks


WORDS = "a rank holds one shard of each parameter and gathers the others when their module computes"


def example(rank: int, world: int, name: str, runs: list[list[str]], output: str) -> list[str]:
    """What rank 0 prints in each run. The model that the last one saved loads."""
    from transformers import GPT2LMHeadModel

    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__file__ = f"{output}/pages/examples/{name}.py"  # it trains on the pages above it
    printed = []
    for arguments in runs:
        with launched(rank, world), contextlib.redirect_stdout(io.StringIO()) as told:
            module.main([*arguments, "--output", output])
        printed.append(told.getvalue())
    if rank == 0:
        _, loaded = GPT2LMHeadModel.from_pretrained(f"{output}/model", output_loading_info=True)
        assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return printed


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", ["accelerate_train", "trainer_train"])
def test_an_example_trains_and_goes_on_at_another_stage(name: str, tmp_path: Path) -> None:
    (tmp_path / "deepspeed.yaml").write_text(DEEPSPEED)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "page.md").write_text(" ".join(random.Random(0).choices(WORDS.split(), k=12_000)))
    runs = [
        ["--config", str(tmp_path / "deepspeed.yaml"), "--steps", "20"],
        ["--stage", "3", "--resume", "--steps", "24"],
    ]
    found = ranks.run(example, args=(name, runs, str(tmp_path)))[0]
    for printed, expected in zip(found, ["ShardedDDP 20", "FSDP 24"], strict=True):
        wrapper, loss, steps = re.findall(r"^(\w+): loss (\S+) after (\d+) steps$", printed, re.MULTILINE)[-1]
        assert f"{wrapper} {steps}" == expected
        assert float(loss) < 4.5  # of bytes that are drawn from all 256 alike it is 5.5
