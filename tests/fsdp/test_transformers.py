"""Models of the transformers library, as users have them: trained at every stage, generating, checkpointed, and adapted
by peft (LoRA), with which tests/integrations/test_adapters.py trains.

The reference is the same model trained by a few lines of torch (runs.py): on two ranks, the same bits."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import matrix
import ranks
import zero
from inner import unit_modules, unit_names
from runs import SideBySide, stage_2, stage_3
from zoo import OPTIMIZERS

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from families import FAMILIES, VOCABULARY, Family

# peft still asks transformers by the old name.
OLD_NAME = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(OLD_NAME)]


def by_oss(model: nn.Module, optim: Any, **options: Any) -> Any:
    return DistributedDataParallel(model, **options), zero.OSS(model.parameters(), optim)


STAGES: dict[str, tuple[Callable[[Family], Callable[..., Any]], str]] = {
    "1": (lambda family: partial(by_oss, **family.ddp), "sgd"),
    "2": (lambda family: stage_2, "sgd"),
    "3": (lambda family: stage_3, "adamw"),
    "3 kept": (lambda family: partial(stage_3, reshard_after_forward=False), "sgd"),
    "3 by class": (lambda family: partial(stage_3, auto_wrap_policy=ModuleWrapPolicy(family.blocks)), "sgd"),
}
"""How a stage is set up, and the optimizer to try it with."""


TRAINED = [("gpt2", "3"), ("llama", "3"), ("bert", "3"), ("vit", "3"), ("mixtral", "3"), ("t5", "3")]
TRAINED += [("gpt2", "1"), ("bert", "2"), ("mixtral", "2"), ("t5", "3 kept"), ("mixtral", "3 by class")]
if matrix.WHOLE:
    TRAINED = [(name, stage) for name in FAMILIES for stage in STAGES]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "stage"), TRAINED)
@ranks.on(2)
def test_training_is_the_same_at_every_stage(rank, world, name, stage):
    family = FAMILIES[name]
    build, optim = STAGES[stage]
    both = SideBySide(family.model(), build(family), OPTIMIZERS[optim])
    assert stage not in ("3", "3 kept") or len(unit_names(both.model)) == family.units
    for step in range(2):
        both.step(family.loss(rank, step))


def prompts(rank: int, number: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (number, 5), generator=torch.Generator().manual_seed(rank))


def generated(rank: int, world: int, name: str) -> list[list[int]]:
    """What wrapped and plain model generate is the same: greedily, with beams, and after a step of training."""
    family = FAMILIES[name]
    both = SideBySide(family.model(), stage_3)
    # Random weights repeat themselves; so the tokens depend on what came before.
    how: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "no_repeat_ngram_size": 1}
    for beams in (1, 2):
        both.model.eval(), both.plain.eval()
        found, expected = (
            model.generate(prompts(rank), num_beams=beams, pad_token_id=0, **how) for model in (both.model, both.plain)
        )
        assert found.tolist() == expected.tolist()
        both.model.train(), both.plain.train()
        both.step(family.loss(rank, beams))
    return expected.tolist()


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["mixtral", "t5", *(["gpt2", "llama"] if matrix.WHOLE else [])])
def test_a_wrapped_model_generates(name):
    """`generate` is another method than forward, and T5's calls its encoder by itself."""
    first, second = ranks.run(generated, args=(name,))
    assert first != second


def generated_until_each_is_done(rank: int, world: int) -> tuple[list[int], list[int]]:
    plain, wrapped = FAMILIES["gpt2"].model().eval(), zero.FSDP(FAMILIES["gpt2"].model()).eval()
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 1}
    whole = plain.generate(prompts(rank, 1), min_new_tokens=8, **how)
    how["eos_token_id"] = whole[0, 6 + 4 * rank].item()
    found = wrapped.generate(prompts(rank, 1), synced_gpus=True, **how)
    return found[0].tolist(), plain.generate(prompts(rank, 1), **how)[0].tolist()


def test_ranks_may_generate_texts_of_different_lengths():
    """With transformers' `synced_gpus`: who is done goes on calling the model, for the others."""
    (first, expected_first), (second, expected_second) = ranks.run(generated_until_each_is_done)
    assert (first, second) == (expected_first, expected_second)
    assert len(first) < len(second)


@matrix.combined("name, reentrant", FAMILIES if matrix.WHOLE else ["gpt2", "t5"], [False, True])
@ranks.on(2)
def test_activations_are_recomputed_in_backward(rank, world, name, reentrant):
    family = FAMILIES[name]
    model = family.model()
    inner = model.bert if name == "bert" else model
    inner.activation_checkpointing_enable({"use_reentrant": reentrant})
    inner.config.use_cache = False
    both = SideBySide(model, stage_3)
    calls: list[nn.Module] = []
    units = unit_modules(both.model)[1:]
    for unit in units:
        leaf = next(module for module in unit.modules() if not any(True for _ in module.children()))
        leaf.register_forward_pre_hook(lambda module, _: calls.append(module))
    both.step(family.loss(rank, 0))
    assert len(calls) == 2 * len(units), "once in forward, once in backward"


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@ranks.on(2)
def test_adapters_are_saved_and_loaded_by_peft(rank, world):
    import peft  # takes seconds, on the ranks alone

    def lora() -> Any:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["q_proj"])
        torch.manual_seed(1)
        return peft.get_peft_model(FAMILIES["llama"].model(), config)

    plain, wrapped = lora(), zero.FSDP(lora())
    expected = peft.get_peft_model_state_dict(plain)
    found = peft.get_peft_model_state_dict(wrapped.module, state_dict=wrapped.state_dict())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other = {name: value + 1 for name, value in found.items()}
    with wrapped.summon_full_params():
        peft.set_peft_model_state_dict(wrapped.module, other)
    peft.set_peft_model_state_dict(plain, other)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in wrapped.state_dict().items())
