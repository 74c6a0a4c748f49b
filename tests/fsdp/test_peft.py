"""LoRA by peft around models of transformers: the base is frozen and in shards, only adapters are trained."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
import zero
from inner import shard_groups
from runs import SideBySide
from zoo import OPTIMIZERS

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
if find_spec("peft") is None:
    pytest.skip("needs peft", allow_module_level=True)

from families import FAMILIES, VOCABULARY

# peft still asks transformers by the old name.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj"]}


def lora(name: str, **options: Any) -> Any:
    """Adapters that are no zeros, so that gradients come to both halves of them from the first step on."""
    import peft  # takes seconds, on the ranks alone

    base = FAMILIES[name].model()
    base.config.use_cache = False
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        init_lora_weights=False,
        target_modules=TARGETS[name],
        fan_in_fan_out=name == "gpt2",
        **options,
    )
    torch.manual_seed(1)
    return peft.get_peft_model(base, config)


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if "lora_" in name]


@pytest.mark.parametrize(
    ("name", "stage", "reentrant"),
    [("gpt2", "2", None), ("gpt2", "3", None), ("llama", "2", None), ("llama", "3", False), ("llama", "3", True)],
)
@ranks.on(2)
def test_adapters_train_the_same_at_every_stage(rank, world, name, stage, reentrant):
    """reentrant: how activations are recomputed, if they are."""
    model = lora(name)
    if reentrant is not None:
        model.enable_input_require_grads()  # for the re-entrant kind, which else finds nothing to train
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    both = SideBySide(model, stage, OPTIMIZERS["adamw" if stage == "3" else "sgd"])
    before = zero.full_state_dict(both.model)
    for step in range(3):
        both.step(FAMILIES[name].loss(rank, step))
    after = zero.full_state_dict(both.model)
    changed = {key for key in after if not torch.equal(before[key], after[key])}
    assert changed == {key for key in after if "lora_" in key}


@ranks.on(2)
def test_only_adapters_have_gradients_and_optimizer_state(rank, world):
    family, model = FAMILIES["gpt2"], lora("gpt2")
    frozen = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    trainable = sum(param.nbytes for param in adapters(model))
    wrapped = zero.FSDP(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())  # of all: what is frozen costs nothing
    sent = zero.traffic()
    family.loss(rank, 0)(wrapped).backward()
    reduced = (zero.traffic() - sent).reduce
    optimizer.step()

    trained = {param for param in wrapped.parameters() if param.grad is not None}
    assert {param for param in adapters(wrapped) if param.numel()} <= trained <= set(adapters(wrapped))
    assert trained == set(optimizer.state)
    storages = {param.untyped_storage() for param in wrapped.parameters()}
    total = torch.tensor([sum(param.grad.nbytes for param in trained), sum(one.nbytes() for one in storages)])
    dist.all_reduce(total)
    padding = 64 * 2 * (1 + world) * len(shard_groups(wrapped))
    assert total[0] == trainable
    assert frozen + trainable <= total[1] <= frozen + trainable + padding
    assert trainable * (world - 1) / world <= reduced <= trainable * (world - 1) / world + padding


@ranks.on(2)
def test_adapters_are_saved_and_loaded_by_peft(rank, world):
    import peft

    plain, wrapped = lora("llama"), zero.FSDP(lora("llama"))
    expected = peft.get_peft_model_state_dict(plain)
    found = peft.get_peft_model_state_dict(wrapped.module, state_dict=wrapped.state_dict())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other = {name: value + 1 for name, value in found.items()}
    with wrapped.summon_full_params():
        peft.set_peft_model_state_dict(wrapped.module, other)
    peft.set_peft_model_state_dict(plain, other)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in wrapped.state_dict().items())


@ranks.on(2)
def test_a_wrapped_model_generates_with_and_without_its_adapters(rank, world):
    plain, wrapped = lora("gpt2").eval(), zero.FSDP(lora("gpt2")).eval()
    prompts = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(rank))

    def tokens(model: Any) -> Tensor:
        return model.generate(input_ids=prompts, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)

    adapted = tokens(plain)
    assert torch.equal(tokens(wrapped), adapted)
    with plain.disable_adapter(), wrapped.module.disable_adapter():
        base = tokens(plain)
        assert torch.equal(tokens(wrapped), base)
    assert not torch.equal(base, adapted)
