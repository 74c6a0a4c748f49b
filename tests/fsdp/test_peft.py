"""LoRA by peft around models of transformers: the base is frozen and in shards, only adapters are trained."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import ranks
import zero
from runs import SideBySide
from zoo import OPTIMIZERS

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
if find_spec("peft") is None:
    pytest.skip("needs peft", allow_module_level=True)

from families import FAMILIES

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


@pytest.mark.parametrize(
    ("name", "stage", "reentrant"), [("gpt2", "3", None), ("llama", "2", None), ("llama", "3", True)]
)
@ranks.on(2)
def test_adapters_train_the_same_at_every_stage(rank, world, name, stage, reentrant):
    """reentrant: how activations are recomputed, if they are."""
    model = lora(name)
    if reentrant is not None:
        model.enable_input_require_grads()  # for the re-entrant kind, which else finds nothing to train
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    both = SideBySide(model, stage, OPTIMIZERS["adamw" if stage == "3" else "sgd"])
    before = zero.full_state_dict(both.model, to=None)
    for step in range(2):
        both.step(FAMILIES[name].loss(rank, step))
    after = zero.full_state_dict(both.model, to=None)
    changed = {key for key in after if not torch.equal(before[key], after[key])}
    assert changed == {key for key in after if "lora_" in key}


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
