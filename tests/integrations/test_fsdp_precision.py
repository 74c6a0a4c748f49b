"""`mixed_precision: bf16` beside an fsdp_config, against Accelerate's own FSDP: dtypes of units and state, and losses.
Accelerate takes ranks on CPUs for no users of FSDP, unless told that they have GPUs."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn

import ranks
import zero
from inner import shard_groups
from launched import launched
from zero.comm import traffic
from zero.integrations.accelerate import Accelerator, ZeroPlugin
from zoo import CONTEXT, GPT, VOCABULARY

BLOCKS = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "DecoderBlock"}


def untied(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = GPT()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    model.register_buffer("scale", torch.ones(3))
    return model.to(dtype)


def trained(accelerator: Any, dtype: torch.dtype = torch.float32) -> tuple[list[float], Tensor, Any, Any]:
    """Losses, what the model returned last, the model and its optimizer."""
    model = untied(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    tokens = torch.randint(VOCABULARY, (16, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(4):
        batch = tokens[2 * step + 8 * accelerator.process_index :][:2]
        out = model(batch[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), batch[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, out, model, optimizer


def accelerates(version: int) -> Any:
    PartialState(cpu=True)
    PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
    options = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["DecoderBlock"]}
    if version == 1:
        options |= {"sync_module_states": False, "use_orig_params": True}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    return accelerate.Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@ranks.on(2, timeout=100)
def test_bf16_beside_an_fsdp_config_trains_as_with_accelerate_without_autocast(rank, world, version, tmp_path):
    """Trained parameters of any dtype become float32 shards; buffers stay as they are."""
    with launched(rank, world):
        expected, *_ = trained(accelerates(version))
    file = Path(tmp_path, f"{rank}.yaml")
    keys = "".join(f"  {name}: {value}\n" for name, value in {**BLOCKS, "fsdp_version": version}.items())
    file.write_text(f"mixed_precision: bf16\nfsdp_config:\n{keys}")
    reduced = []
    wide = zero.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    for precision, dtype in ((None, torch.float32), (wide, torch.bfloat16)):
        plugin = ZeroPlugin(**vars(ZeroPlugin.from_yaml(file)), precision=precision)
        with launched(rank, world):
            before = traffic()
            losses, output, model, optimizer = trained(Accelerator(cpu=True, zero_plugin=plugin), dtype)
            reduced.append((traffic() - before).reduce)
        assert losses == pytest.approx(expected, rel=0.02 if dtype == torch.float32 else 0.1)
        assert output.dtype == torch.bfloat16 and model.module.scale.dtype == dtype
        assert {(one.full.dtype, one.shard.dtype) for one in shard_groups(model)} == {(torch.bfloat16, torch.float32)}
        assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert reduced[1] == 2 * reduced[0]


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_trained_parameters_of_16_bits_keep_their_values_as_masters(rank, world, stage):
    start = untied(torch.bfloat16)
    plugin = ZeroPlugin(stage=stage, mixed_precision="bf16")
    with launched(rank, world):
        accelerator = Accelerator(cpu=True, zero_plugin=plugin)
        model = untied(torch.bfloat16)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        accelerator.backward(model(torch.ones(1, CONTEXT, dtype=torch.long)).sum())
        optimizer.step()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    state = zero.full_optimizer_state_dict(model, optimizer, to=None)["state"]
    for number, param in enumerate(start.parameters()):
        assert torch.equal(state[number]["zero_master"], param.float())
