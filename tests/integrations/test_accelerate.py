"""Scripts as Accelerate's users write them, at stages 1, 2 and 3, against Accelerate itself, which is DDP."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from accelerate.utils.deepspeed import DummyOptim
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import matrix
import ranks
import zero
from launched import launched, shared_folder
from runs import norm_of_gradients
from zero.checkpoint import write
from zero.integrations.accelerate import Accelerator, ZeroPlugin
from zoo import CONTEXT, GPT, VOCABULARY, data

STAGES = (1, 2, 3)
Weights = dict[str, Tensor]


def build(stage: int, **options: Any) -> Any:
    """Accelerate's own Accelerator at stage 0."""
    if stage == 0 and "zero_plugin" not in options:
        return accelerate.Accelerator(cpu=True, **options)
    return Accelerator(**{"cpu": True, "zero_plugin": stage, **options})


class Script:
    """A training script: each rank draws other weights (but if `alike`) and takes its share of the batches."""

    def __init__(
        self, accelerator: Any, *, model: Callable[[], nn.Module] = GPT, optim: Any = AdamW, alike: bool = False
    ) -> None:
        self.accelerator = accelerator
        torch.manual_seed(1)
        tokens = torch.randint(VOCABULARY, (16, CONTEXT + 1))
        torch.manual_seed(0 if alike else accelerator.process_index)
        plain = model()
        optimizer = optim([param for param in plain.parameters() if param.requires_grad], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(TensorDataset(tokens), batch_size=2)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            plain, optimizer, loader, scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def train(self, clip: float | None = None, *, start: int = 0, stop: int | None = None) -> Script:
        for (tokens,) in [*self.loader][start:stop]:
            with self.accelerator.accumulate(self.model):
                loss = self.loss(tokens)
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), clip)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self

    def weights(self) -> Weights:
        return zero.full_state_dict(self.model, to=None)


def farthest(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


class WithDropout(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT))
        for block in self.blocks:
            x = F.dropout(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), 0.2, self.training)
        return self.head(self.norm(x))


WAYS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "with dropout and checkpoints": {"model": WithDropout},
    "with state that the optimizer has from the start": {"optim": torch.optim.Adagrad},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@ranks.on(2)
def test_losses_and_weights_are_those_of_ddp_bit_for_bit(rank, world, tmp_path, how):
    with launched(rank, world):
        torch.manual_seed(0)
        expected = Script(build(0), **WAYS[how]).train()
        expected_weights = expected.weights()
    hybrid = ZeroPlugin(stage=3, activation_checkpointing=True, sharding_strategy="HYBRID_SHARD", shard_size=1)
    on_disk = ZeroPlugin(stage=2, offload=zero.DiskOffload(tmp_path))
    for plugin in (*STAGES, *([0, hybrid, on_disk] if how == "plainly" else [])):
        with launched(rank, world):
            got = Script(build(3, zero_plugin=plugin), **WAYS[how]).train()
            assert got.losses == expected.losses, plugin
            assert farthest(got.weights(), expected_weights) == 0, plugin


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_mixed_precision_is_the_precision_of_setup(rank, world, stage):
    """Bit for bit, and with as many bytes sent."""
    with launched(rank, world):
        got = Script(build(stage, mixed_precision="bf16"))
        before = zero.traffic()
        got.train(clip=0.5)
        sent, weights, batches = zero.traffic() - before, got.weights(), [*got.loader]
    torch.manual_seed(rank)
    plain = GPT()
    optimizer = AdamW(plain.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer = zero.setup(plain, optimizer, stage=stage, precision="bf16")
    losses, norms, before = list[float](), list[float](), zero.traffic()
    for (tokens,) in batches:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        for _ in range(world):  # as Accelerate does
            schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert (got.losses, got.norms) == (losses, norms)
    assert sent == zero.traffic() - before
    assert farthest(weights, zero.full_state_dict(model, to=None)) == 0


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def backwards(accelerator: Any, model: nn.Module, batches: list[Tensor], how: str) -> None:
    if how == "twice":  # both forwards come first
        for loss in [model(batch).square().mean() for batch in batches]:
            accelerator.backward(loss)
        return
    called = accelerator.unwrap_model(model) if how == "around" else model
    with accelerator.no_sync(model) if how == "under no_sync" else nullcontext():
        for batch in batches:
            accelerator.backward(called(batch).square().mean())


@pytest.mark.parametrize("together", [True, False])
@ranks.on(2)
def test_a_step_on_gradients_that_are_not_averaged_is_right_or_refused(rank, world, together):
    batches = [[data(4, 6, rank=one, step=step) for step in range(2)] for one in range(world)]
    for how in ("under no_sync", "around", "twice", "once more"):
        expected = small()
        for batch in itertools.chain.from_iterable(batches):
            (expected(batch).square().mean() / world).backward()
        torch.optim.SGD(expected.parameters(), lr=0.5).step()
        for stage in STAGES:
            with launched(rank, world):
                accelerator, model = build(stage), small()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
                if together or stage == 2:
                    model, optimizer = accelerator.prepare(model, optimizer)
                else:
                    model, optimizer = accelerator.prepare(model), accelerator.prepare(optimizer)
                backwards(accelerator, model, batches[rank], how)
                error = ranks.refusal(optimizer.step)
                if how == "under no_sync":
                    assert error.startswith("RuntimeError") and "ran under no_sync()" in error, (stage, error)
                    continue
                assert not error, (how, stage, error)
                assert farthest(zero.full_state_dict(model, to=None), expected.state_dict()) <= 1e-6, (how, stage)


class Branches(nn.ModuleList):
    def forward(self, x: Tensor, which: int) -> Tensor:
        return self[which](x)


@ranks.on(2)
def test_what_the_last_backward_does_not_reach_is_averaged_where_accelerate_was_told_to_find_it(rank, world):
    found = []
    for stage in (0, 1):
        with launched(rank, world):
            finds = DistributedDataParallelKwargs(find_unused_parameters=True)
            accelerator = build(stage, kwargs_handlers=[finds])
            torch.manual_seed(0)
            model = Branches([nn.Linear(6, 6), nn.Linear(6, 6)])
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            for _ in range(2):
                with accelerator.no_sync(model):
                    accelerator.backward(model(torch.ones(2, 6), rank).sum())
                accelerator.backward(model(torch.ones(2, 6), 1 - rank).square().sum())
                optimizer.step()
                optimizer.zero_grad()
            found.append(zero.full_state_dict(model, to=None))
    assert farthest(*found) == 0


@ranks.on(2)
def test_uneven_batches_are_joined_by_zero_and_refused_elsewhere(rank, world):
    """Of three batches rank 0 has the first and the last."""
    batches = data(6, 6, rank=0).split(2)
    uneven = DataLoaderConfiguration(even_batches=False)

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    expected, reference = made()
    for step in (batches[:2], batches[2:]):
        reference.zero_grad()
        for batch in step:
            (expected(batch).square().mean() / len(step)).backward()
        reference.step()
    for stage in STAGES:
        with launched(rank, world):
            accelerator = build(stage, dataloader_config=uneven)
            loader = DataLoader(TensorDataset(torch.cat(batches)), batch_size=2)
            model, optimizer, loader = accelerator.prepare(*made(), loader)
            told = ranks.refusal(lambda of=accelerator, one=model: of.join_uneven_inputs([one]).__enter__())
            assert told.startswith("RuntimeError") and "zero.join(loader, model)" in told, told
            for (batch,), weight in zero.join(loader, model):
                accelerator.backward(weight * model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            assert farthest(zero.full_state_dict(model, to=None), expected.state_dict()) <= 1e-6, stage
            with accelerator.join_uneven_inputs([model], even_batches=True):
                accelerator.backward(model(batches[0]).square().mean())


# Adam with its own eps would make a rate of any gradient that is rounding alone.
OPTIMIZERS = [partial(torch.optim.SGD, momentum=0.9), partial(AdamW, eps=1e-3)]


@pytest.mark.slow
@pytest.mark.parametrize("optim", OPTIMIZERS, ids=["SGD", "AdamW"])
@ranks.on(2)
def test_accumulation_holds_shards_of_gradients_and_gives_the_numbers_of_ddp(rank, world, optim):
    size = sum(param.nbytes for param in GPT().parameters())
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False)
    with launched(rank, world):
        expected = Script(build(0, gradient_accumulation_plugin=plugin), optim=optim).train().train()
        expected_weights = expected.weights()
    for stage in STAGES:
        with launched(rank, world):
            got = Script(build(stage, gradient_accumulation_plugin=plugin), optim=optim).train().train()
            assert got.losses == pytest.approx(expected.losses, rel=1e-6)
            assert farthest(got.weights(), expected_weights) <= 1e-6, stage
            [tokens], *_ = got.loader
            for ask in (got.accelerator.accumulate, got.accelerator.no_sync):  # the second is what a script says itself
                with ask(got.model):
                    got.accelerator.backward(got.loss(tokens))
                assert not got.accelerator.sync_gradients
                share = 0.5 if stage > 1 and ask == got.accelerator.accumulate else 1.0
                assert zero.report(got.model, got.optimizer).gradients / size == pytest.approx(share, rel=0.01)
                got.optimizer.optimizer.zero_grad()


@pytest.mark.slow
@ranks.on(2)
def test_clipping_gives_the_norms_and_weights_of_ddp(rank, world):
    with launched(rank, world):
        expected = Script(build(0)).train(clip=0.1)
        expected_weights = expected.weights()
    for stage in STAGES:
        with launched(rank, world):
            got = Script(build(stage))
            got.accelerator._models.clear()  # as free_memory() does before each Trainer.train()
            got.train(clip=0.1)
            assert got.norms == pytest.approx(expected.norms, abs=1e-5), stage
            assert farthest(got.weights(), expected_weights) <= 1e-6, stage
    for stage in (0, 2, 3):
        with launched(rank, world):  # as scripts for DeepSpeed, which call no clip_grad_norm_
            plugin = ZeroPlugin(stage=stage, gradient_clipping=0.1)
            assert farthest(Script(build(3, zero_plugin=plugin)).train().weights(), expected_weights) <= 1e-6, stage


def of_two_halves(rank: int, stage: int, *, by_plugin: bool) -> tuple[list[float], Weights]:
    """Each clipped and stepped by an optimizer of its own. Returns losses and the model's weights."""
    plugin = ZeroPlugin(stage=stage, gradient_clipping=0.05) if by_plugin else stage
    accelerator, losses, model = build(stage, **({"zero_plugin": plugin} if stage else {})), [], small()
    halves = [torch.optim.SGD(model[number].parameters(), lr=0.5, momentum=0.9) for number in (0, 2)]
    model, *optimizers = accelerator.prepare(model, *halves)
    for step in range(3):
        loss = model(torch.full((2, 6), 1.0 + rank + step)).square().mean()
        accelerator.backward(loss)
        losses.append(loss.item())
        for one in optimizers:
            if not by_plugin:
                accelerator.clip_grad_norm_([param for group in one.param_groups for param in group["params"]], 0.05)
            one.step()
            one.zero_grad()
    return losses, zero.full_state_dict(model, to=None)


@pytest.mark.slow
@ranks.on(2)
def test_each_of_two_optimizers_is_clipped_by_the_norm_of_its_own_gradients(rank, world):
    with launched(rank, world):
        expected, expected_weights = of_two_halves(rank, 0, by_plugin=False)
    for stage, by_plugin in itertools.product(STAGES, [False, True]):
        with launched(rank, world):
            losses, weights = of_two_halves(rank, stage, by_plugin=by_plugin)
        assert losses == pytest.approx(expected, rel=1e-5), (stage, by_plugin)
        assert farthest(weights, expected_weights) <= 1e-6, (stage, by_plugin)


in_sixteen_bits = partial(ZeroPlugin, mixed_precision="bf16")  # as a deepspeed_config makes it


@pytest.mark.slow
@ranks.on(2)
def test_configurations_of_deepspeed_have_parameters_of_16_bits_and_masters_in_shards(rank, world):
    size = sum(param.numel() for param in GPT().parameters())
    with launched(rank, world):
        in_32_bits = Script(build(0)).train().losses
    losses = []
    for stage in STAGES:
        with launched(rank, world):
            script = Script(build(stage, zero_plugin=in_sixteen_bits(stage))).train()
            losses.append(script.losses)
            script.loss(next(iter(script.loader))[0]).backward()
            held = zero.report(script.model, script.optimizer)
        # Of a parameter: 2 bytes, 2 of the gradient, and in shards 4 of the master, 8 of Adam, 4 of the gradient.
        expected = {1: [2, 2, 12 / 2], 2: [2, 4 / 2, 12 / 2], 3: [4 / 2, 4 / 2, 8 / 2]}[stage]
        bytes_of = [held.parameters / size, held.gradients / size, held.optimizer / size]
        assert bytes_of == pytest.approx(expected, rel=0.05)
        assert losses[-1] == pytest.approx(in_32_bits, rel=0.03)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
@ranks.on(bare=True)
def test_one_process_trains_alone(rank, world, tmp_path):
    """Without torch.distributed, as `python script.py` starts it."""
    found = []
    for stage in (0, 2, 3):
        with launched(0, 1):
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                del os.environ[name]
            script = Script(build(stage)).train(clip=0.1)
            script.accelerator.save_state(str(tmp_path))
            script.accelerator.load_state(str(tmp_path))
            found.append(script.losses + script.norms)
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found)


def apart(rank: int, world: int, asked: int) -> list[str]:
    """On CPUs, but without cpu=True: Accelerate then says NO to ranks."""
    told = []
    for stage in (0, *STAGES):
        no_gpu = mock.patch("torch.cuda.is_available", return_value=False)
        with launched(rank, asked, ACCELERATE_USE_CPU="false"), no_gpu:
            if not dist.is_initialized():
                del os.environ["LOCAL_RANK"]  # otherwise Accelerate initialises a group, and says NO all the same
            told.append(ranks.refusal(partial(build, stage, cpu=False, zero_plugin=stage)))
    return told


@pytest.mark.parametrize("initialised", [False, True])
def test_ranks_that_accelerate_would_train_apart_are_refused(initialised):
    for error in (told for found in ranks.run(apart, args=(2,), bare=not initialised) for told in found):
        assert error.startswith("RuntimeError: Accelerate found one process"), error
        assert "2 ranks" in error and "Accelerator(cpu=True)" in error
    if not initialised:  # one process of a launcher is not
        assert ranks.run(apart, args=(1,), bare=True) == [[""] * 4]


def in_shards(plugin: ZeroPlugin) -> ZeroPlugin:
    return ZeroPlugin(**vars(plugin), state_dict_type="SHARDED_STATE_DICT")


KINDS: dict[str, tuple[Callable[[int], ZeroPlugin], tuple[int, ...], list[tuple[int, int]]]] = {
    "full": (ZeroPlugin, (0, *STAGES), [(0, 1), (1, 2), (2, 3), (3, 0)]),
    "sharded": (lambda stage: in_shards(ZeroPlugin(stage=stage)), STAGES, [(2, 3), (3, 1)]),
    "full, with masters": (in_sixteen_bits, (), [(2, 3)]),
    "sharded, with masters": (lambda stage: in_shards(in_sixteen_bits(stage)), (2, 3), [(3, 2)]),
}
"""The plugin at a stage; stages; and those of them that save, and that go on from there in the suite."""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2, timeout=100)
def test_a_state_goes_on_bit_for_bit_at_any_stage_and_without_zero(rank, world, tmp_path, kind):
    plugin, stages, every = KINDS[kind]
    every = [*itertools.product(stages, stages)] or every if matrix.WHOLE else every
    dtype = torch.bfloat16 if "masters" in kind else torch.float32

    def started(stage: int) -> Script:
        return Script(build(stage, **({"zero_plugin": plugin(stage)} if stage else {})))

    with launched(rank, world):
        expected = started(every[0][0]).train()
        expected_weights = {name: value.to(dtype) for name, value in expected.weights().items()}
    for first in dict(every):
        with launched(rank, world):
            script = started(first).train(stop=2)
            script.accelerator.save_state(str(shared_folder(tmp_path, str(first))))
            script.accelerator.wait_for_everyone()
    for first, second in every:
        with launched(rank, world):
            again = started(second)
            again.accelerator.load_state(f"{tmp_path}/{first}")
            again.train(start=2)
            got = {name: value.to(dtype) for name, value in again.weights().items()}
        assert again.losses == expected.losses[2:], (first, second)
        assert farthest(got, expected_weights) == 0, (first, second)


@pytest.mark.slow
@ranks.on(2)
def test_saved_weights_are_all_there_and_load_into_the_plain_model(rank, world, tmp_path):
    sixteen = ZeroPlugin(stage=3, save_16bit_model=True, mixed_precision="bf16")
    for title, plugin in {1: 1, 2: 2, 3: 3, "16 bits": sixteen}.items():
        with launched(rank, world):
            script = Script(build(3, zero_plugin=plugin)).train(stop=1)
            place = Path(tmp_path, str(title))
            script.accelerator.save_model(script.model, str(place), max_shard_size="20KB" if title == 3 else "1GB")
            script.accelerator.wait_for_everyone()
            expected = script.weights()
            assert type(script.accelerator.unwrap_model(script.model)) is GPT
        files = [*place.glob("*.safetensors")]
        assert (len(files) > 1) == (title == 3)
        found = {name: value for file in files for name, value in load_file(file).items()}
        assert {value.dtype for value in found.values()} == {torch.bfloat16 if title == "16 bits" else torch.float32}
        assert title == "16 bits" or all(torch.equal(value, expected[name]) for name, value in found.items())
        missing, unexpected = GPT().load_state_dict(found, strict=False)
        assert (missing, unexpected) == (["head.weight"], [])  # tied to the embedding


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_calls_beside_the_loop(rank, world, stage, tmp_path):
    with launched(rank, world):
        accelerator = build(stage)
        script = Script(accelerator)
        hooked = []
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: hooked.append((models, len(weights))))
        part = [*script.model.parameters()][:2]
        script.loss(next(iter(script.loader))[0]).backward()
        accelerator.clip_grad_value_(part, 1e-3)
        assert part[0].grad.abs().max() == part[1].grad.abs().max() == part[0].grad.new_tensor(1e-3)
        assert accelerator.clip_grad_norm_(part, 1e-4) > 1e-3
        torch.testing.assert_close(norm_of_gradients(part), torch.tensor(1e-4), rtol=1e-2, atol=0)
        assert accelerator.prepare(script.model) is script.model
        accelerator.save_state(str(tmp_path))
        assert hooked == [([script.model], 1)]
        zero.checkpoint.save(tmp_path / "run", script.model, script.optimizer)
        assert accelerator.free_memory(script.model, script.optimizer) == [None, None] and accelerator._models == []


class Two:
    """Two models of one shape, each with an optimizer. Hooks save and load the first one's weights and take it out."""

    def __init__(self, plugin: ZeroPlugin) -> None:
        self.accelerator, models = build(3, zero_plugin=plugin), [nn.Linear(6, 6) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        first, second, *self.optimizers = self.accelerator.prepare(*models, *optimizers)
        self.models = first, second
        self.accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights and weights.pop(0))
        self.accelerator.register_load_state_pre_hook(lambda models, folder: models.remove(first))

    def train(self) -> Two:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.accelerator.backward(model(torch.ones(2, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return self

    def seen(self) -> list[Weights]:
        """The weights of both models, and then these again with the momenta of their optimizers."""
        weights = [zero.full_state_dict(model, to=None) for model in self.models]
        momenta = [dict(zero.full_tensors(*pair, to=None)) for pair in zip(self.models, self.optimizers, strict=True)]
        return [{name: value.clone() for name, value in found.items()} for found in [*weights, *momenta]]


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_models_that_a_hook_loads_leave_the_others_their_own(rank, world, stage, tmp_path):
    for plugin in (ZeroPlugin(stage=stage), in_shards(ZeroPlugin(stage=stage))):
        place = shared_folder(tmp_path, str(plugin))
        with launched(rank, world):
            torch.manual_seed(0)
            two = Two(plugin).train()
            saved = two.seen()
            two.accelerator.save_state(str(place))
            later = two.train().seen()
            two.accelerator.load_state(str(place))
            first = {**saved[2], **later[0]}  # which has other weights beside the momenta that were saved
            expected = [later[0], saved[1], first, saved[3]]
            assert [farthest(*pair) for pair in zip(two.seen(), expected, strict=True)] == [0, 0, 0, 0]


class DreamBooth:
    """Two models that one optimizer steps, which are prepared together."""

    def __init__(self, stage: int, **options: Any) -> None:
        self.accelerator = build(stage, **options)
        models = [small() for _ in range(2)]
        optimizer = AdamW([param for one in models for param in one.parameters()], lr=1e-2)
        *self.models, self.optimizer = self.accelerator.prepare(*models, optimizer)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x = torch.full((2, 6), 1.0 + step + self.accelerator.process_index)
            loss = self.models[1](self.models[0](x)).square().mean()
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_([param for one in self.models for param in one.parameters()], 1e3)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def weights(self) -> Weights:
        found = [zero.full_state_dict(model, to=None) for model in self.models]
        return {f"{number}.{name}": value for number, one in enumerate(found) for name, value in one.items()}


@ranks.on(2, timeout=100)
def test_one_optimizer_over_two_models_goes_on_from_a_state_or_is_refused_as_they_are_prepared(rank, world, tmp_path):
    with launched(rank, world):
        expected = DreamBooth(0)
        losses = expected.train(range(4))
    for stage in (0, 1, 3):
        with launched(rank, world):
            saved = DreamBooth(stage)
            assert saved.train(range(2)) == losses[:2], stage
            saved.accelerator.save_state(str(shared_folder(tmp_path, str(stage))))
            saved.accelerator.wait_for_everyone()
    for first, second in ((0, 3), (3, 0), (3, 3), (1, 3), (3, 1)):
        with launched(rank, world):
            again = DreamBooth(second)
            again.accelerator.load_state(f"{tmp_path}/{first}")
            assert again.train(range(2, 4)) == losses[2:], (first, second)
            assert farthest(again.weights(), expected.weights()) == 0, (first, second)
    refused = {2: ZeroPlugin(stage=2), 3: in_shards(ZeroPlugin(stage=3)), 1: in_shards(ZeroPlugin(stage=1))}
    for stage, plugin in refused.items():
        with launched(rank, world):
            error = ranks.refusal(lambda plugin=plugin: DreamBooth(3, zero_plugin=plugin))
            assert error.startswith("ValueError") and "build an optimizer for each model" in error, (stage, error)


@ranks.on(2)
def test_a_gradient_that_no_prepared_model_averages_is_refused_at_stage_1(rank, world):
    with launched(rank, world):
        accelerator, inputs = build(1), torch.full((2, 8), rank + 1.0)
        model, head = nn.Linear(8, 8), nn.Linear(8, 3)  # that of a loss with weights of its own
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1.0)
        model, optimizer = accelerator.prepare(model, optimizer)
        model(inputs).sum().backward()
        optimizer.step()
        head(model(inputs)).sum().backward()
        error = ranks.refusal(optimizer.step)
        assert "is in no model that was wrapped" in error, error
        optimizer.zero_grad()
        head = accelerator.prepare(head)
        before = head.module.weight.detach().clone()
        head(inputs).sum().backward()
        optimizer.step()
        torch.testing.assert_close(head.module.weight.detach(), before - 3.0)  # the mean of 2 and 4


@ranks.on(2)
def test_a_folder_that_is_saved_into_again_has_no_other_state(rank, world, tmp_path):
    full = ZeroPlugin(stage=2)
    kinds = [(in_shards(full), True), (full, True), (full, False), (in_shards(full), True), (full, False), (full, True)]
    fails, expected = OSError("the disk is full"), None
    for number, (plugin, safe) in enumerate(kinds):
        with launched(rank, world):
            script = Script(build(2, zero_plugin=plugin), model=partial(GPT, layers=1)).train(stop=1 + number % 3)
            weights, save = script.weights(), partial(script.accelerator.save_state, str(tmp_path))
            with (
                mock.patch.object(write, "write_rank_file", side_effect=fails),
                mock.patch("torch.save", side_effect=fails),
            ):
                assert "the disk is full" in ranks.refusal(partial(save, safe_serialization=safe))
            if expected is not None:  # it is there until another is complete
                script.accelerator.load_state(str(tmp_path))
                assert farthest(script.weights(), expected) == 0, number
            zero.load_full_state_dict(script.model, weights)
            save(safe_serialization=safe)
            expected = weights
            script.train(stop=1).accelerator.load_state(str(tmp_path))
            assert farthest(script.weights(), expected) == 0
        files = {path.name for path in tmp_path.iterdir()}
        states = {"zero", "model.safetensors", "pytorch_model.bin", "optimizer.bin"} & files
        in_full = {"optimizer.bin", "model.safetensors" if safe else "pytorch_model.bin"}
        assert states == (in_full if plugin is full else {"zero"})
        torch.distributed.barrier()


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_what_one_rank_cannot_write_every_rank_raises_and_goes_on(rank, world, stage, tmp_path):
    with launched(rank, world):
        script = Script(build(stage), model=partial(GPT, layers=1)).train(stop=1)
        for name in ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_1.pkl"):
            place = shared_folder(tmp_path, name)
            shared_folder(place, f"{name}/in the way")
            error = ranks.refusal(partial(script.accelerator.save_state, str(place)))
            assert name in error or "s a directory" in error, (name, error)
        folder = shared_folder(tmp_path, "model.safetensors")
        error = ranks.refusal(partial(script.accelerator.save_model, script.model, str(folder)))
        assert "s a directory" in error, error
        whole = str(shared_folder(tmp_path, "whole"))
        script.accelerator.save_state(whole)
        expected = script.weights()
        script.train(stop=1).accelerator.load_state(whole)
        assert farthest(script.weights(), expected) == 0


@ranks.on(2)
def test_on_hosts_of_their_own_both_ranks_have_what_they_write(rank, world, tmp_path):
    narrow = ZeroPlugin(stage=3, save_16bit_model=True, mixed_precision="bf16")
    for plugin, dtype in ((ZeroPlugin(stage=2), torch.float32), (narrow, torch.bfloat16)):
        with launched(rank, world, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
            script = Script(build(3, zero_plugin=plugin), model=partial(GPT, layers=1)).train(stop=1)
            script.accelerator.project_configuration.save_on_each_node = True
            found, place = script.accelerator.get_state_dict(script.model), Path(tmp_path, f"{rank} {dtype}")
            assert farthest(found, {name: value.to(dtype) for name, value in script.weights().items()}) == 0
            script.accelerator.save_model(script.model, place)
            assert load_file(place / "model.safetensors").keys() < found.keys()  # those that are tied are there once


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_a_state_that_rank_0_cannot_read_is_refused_on_every_rank(rank, world, stage, tmp_path):
    with launched(rank, world):
        script = Script(build(stage), model=partial(GPT, layers=1)).train(stop=1)
        script.accelerator.save_state(str(tmp_path))
        for name in ("optimizer.bin", "model.safetensors"):
            if rank == 0:
                Path(tmp_path, name).unlink()
            told = ranks.refusal(partial(script.accelerator.load_state, str(tmp_path)))
            assert "No such file" in told and (rank == 0 or "rank 0" in told), told
        script.accelerator.register_load_state_pre_hook(lambda models, _: models[rank])  # there is one
        told = ranks.refusal(partial(script.accelerator.load_state, str(tmp_path)))
        assert told.startswith("IndexError"), told


def half_frozen() -> nn.Module:
    model = GPT()
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    return model


@pytest.mark.slow
@ranks.on(2, timeout=100)
def test_a_state_without_frozen_parameters_goes_on_and_holds_none(rank, world, tmp_path):
    frozen = {name for name, param in half_frozen().named_parameters() if not param.requires_grad}
    for stage, plugin in itertools.product(STAGES, (ZeroPlugin, lambda stage: in_shards(ZeroPlugin(stage=stage)))):
        place = shared_folder(tmp_path, f"{stage}{plugin is ZeroPlugin}")
        with launched(rank, world):
            script = Script(build(stage, zero_plugin=plugin(stage)), model=half_frozen).train(stop=2)
            trained = script.accelerator.unwrap_model(script.model).norm.weight.requires_grad_(False)
            script.accelerator.save_state(str(place), exclude_frozen_parameters=True)
            trained.requires_grad_(True)  # what it was trained to is in no other file
            expected = script.train(start=2).losses[2:]
        if plugin is ZeroPlugin:
            saved = {*load_file(place / "model.safetensors")}
            assert saved.isdisjoint(frozen) and "norm.weight" in saved
        else:
            (index,) = place.glob("zero/*/index.json")
            assert {*json.loads(index.read_text())["left_out"]} == frozen
        with launched(rank, world):
            again = Script(build(stage, zero_plugin=plugin(stage)), model=half_frozen)
            again.accelerator.load_state(str(place), strict=plugin is not ZeroPlugin)
            assert again.train(start=2).losses == expected, stage


def of_fsdp(version: int, kind: str) -> Any:
    """Accelerate's own, which takes ranks on CPUs for no users of FSDP, unless told that they have GPUs."""
    PartialState(cpu=True)
    PartialState._shared_state.update(distributed_type=DistributedType.MULTI_GPU, device=torch.device("cpu"))
    options = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["DecoderBlock"]}
    if version == 1:
        options |= {"sync_module_states": False, "use_orig_params": True}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **options)
    return accelerate.Accelerator(fsdp_plugin=plugin)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("version", "kind"),
    # On CPUs FSDP1 crashes while it collects full weights (torch 2.13).
    [(1, "SHARDED_STATE_DICT"), (2, "SHARDED_STATE_DICT"), (2, "FULL_STATE_DICT")],
)
@ranks.on(2, timeout=100)
def test_a_state_of_accelerates_fsdp_goes_on_at_any_stage(rank, world, tmp_path, version, kind):
    with launched(rank, world):
        script = Script(of_fsdp(version, kind), alike=True).train(stop=2)
        script.accelerator.save_state(str(tmp_path))
        expected = script.train(start=2).losses[2:]
    for stage in (0, *STAGES):
        with launched(rank, world):
            again = Script(build(stage, zero_plugin=stage))
            again.accelerator.load_state(str(tmp_path))
            assert again.train(start=2).losses == expected, stage


@matrix.only
@ranks.on(2)
def test_compiled_blocks_train_as_plain_ones_and_save_names_of_those(rank, world, tmp_path):
    model, dynamo = partial(GPT, layers=1), TorchDynamoPlugin("eager", use_regional_compilation=True)
    place = shared_folder(tmp_path, "state")
    with launched(rank, world):
        compiled = Script(build(3, dynamo_plugin=dynamo), model=model).train(stop=1)
        assert any("_orig_mod" in name for name, _ in compiled.accelerator.unwrap_model(compiled.model).named_modules())
        weights = compiled.weights()
        compiled.accelerator.save_state(str(place))
    with launched(rank, world):
        plain = Script(build(3), model=model).train(stop=1)
        assert plain.losses == compiled.losses
        plain.train(stop=1)
        plain.accelerator.load_state(str(place))
        assert farthest(plain.weights(), weights) == 0


@ranks.on(2)
def test_what_cannot_be_is_refused_on_every_rank(rank, world):
    def of(stage: int, **options: Any) -> Any:
        return build(stage, zero_plugin=ZeroPlugin(stage, **options))

    def optimizer_first() -> None:
        accelerator, model = build(2, zero_plugin=masters), GPT()
        accelerator.prepare(AdamW(model.parameters()))
        accelerator.prepare(model)

    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    masters, without = in_sixteen_bits(2), ZeroPlugin(stage=2, mixed_precision="no")
    told: dict[str, Callable[[], Any]] = {
        "Prepare both in one call": lambda: build(2).prepare(GPT()),
        "Build the optimizer": lambda: build(2).prepare(GPT(), DummyOptim([])),
        "an optimizer was prepared before its model": optimizer_first,
        "in 16 bits without its optimizer": lambda: build(1, zero_plugin=in_sixteen_bits(1)).prepare(GPT()),
        "no stage to shard at was given": lambda: build(2, zero_plugin=None),
        "parallelism_config is not available": lambda: build(2, parallelism_config=object()),
        "mixed_precision='bf16' was passed": lambda: build(2, mixed_precision="bf16", zero_plugin=without),
        "is for stage 0": lambda: Script(build(2, kwargs_handlers=[hook])),
        "both say how to shard": lambda: build(2, fsdp_plugin=object()),
        "sharding_strategy='SOME'": lambda: Script(of(3, sharding_strategy="SOME")),
        "auto_wrap_policy='SOME'": lambda: Script(of(3, auto_wrap_policy="SOME")),
        "offload=True": lambda: Script(of(3, offload=True)),
        "partition='some'": lambda: Script(of(2, partition="some")),
        "no option speed=": lambda: Script(of(3, speed=1)),
        "no option prefetch=": lambda: Script(of(2, prefetch=2)),
        "no option precison=. Did you mean precision=": lambda: of(2, precison="bf16"),
        "offload: for stages 1 to 3": lambda: of(0, offload=zero.CPUOffload()),
        "FULL_STATE_DICT or SHARDED_STATE_DICT": lambda: of(3, state_dict_type="LOCAL_STATE_DICT"),
        "precision=torch.float64 is unknown": lambda: of(3, precision=torch.float64),
        "mixed_precision='bf16' and MixedPrecision(": lambda: of(3, precision="fp32", mixed_precision="bf16"),
        "of the ZeroPlugin say different things": lambda: of(2, precision="fp16"),
        "deepspeed_plugin: DeepSpeed's own": lambda: build(None, deepspeed_plugin=object()),
    }
    for expected, call in told.items():
        with launched(rank, world):
            error = ranks.refusal(call)
        assert error.startswith(("ValueError", "TypeError")) and expected in error, error
