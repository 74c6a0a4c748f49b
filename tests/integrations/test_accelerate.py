"""Scripts as Accelerate's users write them, at stages 1, 2 and 3, against Accelerate itself, which is DDP."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, TorchDynamoPlugin
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import matrix
import ranks
import zero
from launched import launched, shared_folder
from zero.integrations.accelerate import Accelerator, ZeroPlugin
from zoo import CONTEXT, GPT, VOCABULARY, data

STAGES = (1, 2, 3)
Weights = dict[str, Tensor]


def slow(case: str) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


def build(stage: int, **options: Any) -> Any:
    """Accelerate's own Accelerator at stage 0."""
    if stage == 0 and "zero_plugin" not in options:
        return accelerate.Accelerator(cpu=True, **options)
    return Accelerator(**{"cpu": True, "zero_plugin": stage, **options})


class Script:
    """A training script: each rank draws other weights and takes its share of the batches."""

    def __init__(self, accelerator: Any, *, model: Callable[[], nn.Module] = GPT, optim: Any = AdamW) -> None:
        self.accelerator = accelerator
        torch.manual_seed(1)
        tokens = torch.randint(VOCABULARY, (16, CONTEXT + 1))
        torch.manual_seed(accelerator.process_index)
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
        found = self.accelerator.get_state_dict(self.model)
        return {name: value.detach().clone() for name, value in found.items()}


def farthest(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


class WithDropout(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT))
        for block in self.blocks:
            x = F.dropout(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), 0.2, self.training)
        return self.head(self.norm(x))


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": ({}, {}),
    "accumulating": ({"gradient_accumulation_steps": 2}, {}),
    "in bf16": ({"mixed_precision": "bf16"}, {}),
    "with dropout and checkpoints": ({}, {"model": WithDropout}),
    "with an optimizer of whole matrices": ({}, {"optim": torch.optim.Adafactor}),
}
"""Options of the Accelerator, and of the script."""


@pytest.mark.parametrize("how", [how if how == "accumulating" else slow(how) for how in WAYS])
@ranks.on(2)
def test_losses_and_weights_are_those_of_ddp_bit_for_bit(rank: int, world: int, tmp_path: Path, how: str) -> None:
    options, script = WAYS[how]
    with launched(rank, world):
        torch.manual_seed(0)
        expected = Script(build(0, **options), **script).train()
        expected_weights = expected.weights()
    recomputing = ZeroPlugin(stage=3, activation_checkpointing=True)
    hybrid = ZeroPlugin(stage=3, sharding_strategy="HYBRID_SHARD", shard_size=1)
    on_disk = [ZeroPlugin(stage=stage, offload=zero.DiskOffload(tmp_path)) for stage in (2, 3)]
    differences = []
    for plugin in (*STAGES, *([0, recomputing, hybrid, *on_disk] if how == "plainly" else [])):
        with launched(rank, world):
            got = Script(build(3, **options, zero_plugin=plugin), **script).train()
            if got.losses != expected.losses or farthest(got.weights(), expected_weights):
                differences.append(plugin)
    assert differences == []


@pytest.mark.slow
@ranks.on(2)
def test_clipping_gives_the_norms_and_weights_of_ddp(rank: int, world: int) -> None:
    with launched(rank, world):
        expected = Script(build(0)).train(clip=0.1)
        expected_weights = expected.weights()
    found = []
    for stage in (0, *STAGES):
        with launched(rank, world):
            got = Script(build(stage))
            got.accelerator._models.clear()  # as free_memory() does before each Trainer.train()
            got.train(clip=0.1)
            norms = max(abs(one - other) for one, other in zip(got.norms, expected.norms, strict=True))
            found.append((norms, farthest(got.weights(), expected_weights)))
        with launched(rank, world):  # as scripts for DeepSpeed, which call no clip_grad_norm_
            plugin = ZeroPlugin(stage=stage, gradient_clipping=0.1)
            got = Script(build(3, zero_plugin=plugin)).train()
            found.append((0.0, farthest(got.weights(), expected_weights)))
    assert all(norms <= 1e-5 and weights <= 1e-6 for norms, weights in found), found


@ranks.on(2)
def test_gradients_travel_in_the_dtype_that_is_asked_for(rank: int, world: int) -> None:
    with launched(rank, world):
        expected = Script(build(0), optim=torch.optim.SGD).train().weights()
    found = []
    for stage in (2, 3):
        with launched(rank, world):
            plugin = ZeroPlugin(
                stage=stage, reduce_dtype=torch.bfloat16, reduce_bucket_size=5000 if stage < 3 else None
            )
            got = Script(build(3, zero_plugin=plugin), optim=torch.optim.SGD).train()
            found.append(farthest(got.weights(), expected))
    assert all(0 < distance < 1e-3 for distance in found), found


@pytest.mark.slow
@ranks.on(2)
def test_loss_scaling_skips_the_steps_that_ddp_skips(rank: int, world: int) -> None:
    """Training in float16, of which the first steps overflow. Accelerate itself offers it on GPUs only."""
    found = []
    for stage in (0, *STAGES):
        with launched(rank, world):
            accelerator = build(stage)
            accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
            scaler = zero.GradScaler if stage else torch.amp.GradScaler
            accelerator.scaler = scaler("cpu", init_scale=2.0**18, growth_interval=2)
            script = Script(accelerator).train()
            found.append((script.losses, accelerator.scaler.get_scale(), script.weights()))
    (losses, scale, weights), *others = found
    assert scale < 2.0**18
    assert all(other[:2] == (losses, scale) and farthest(other[2], weights) == 0 for other in others)


def in_sixteen_bits(stage: int, **more: Any) -> ZeroPlugin:
    return ZeroPlugin.from_json({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, **more})


@pytest.mark.slow
@ranks.on(2)
def test_configurations_of_deepspeed_have_parameters_of_16_bits_and_masters_in_shards(rank: int, world: int) -> None:
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
    assert losses[1] == losses[2]  # DistributedDataParallel rounds the averages of stage 1 to 16 bits


@pytest.mark.slow
@ranks.on(2)
def test_all_of_a_model_in_16_bits_but_batch_normalisation(rank: int, world: int) -> None:
    found = []
    for stage in STAGES:
        with launched(rank, world):
            accelerator = build(stage, zero_plugin=in_sixteen_bits(stage))
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
            plain = plain.to(torch.bfloat16 if stage == 3 else torch.float32)  # as files have it
            model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
            for step in range(3):
                output = model(data(4, 5, rank=rank, step=step))
                assert output.dtype == torch.bfloat16
                accelerator.backward(output.float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
            weights = accelerator.get_state_dict(model)
            assert weights["1.running_mean"].dtype == weights["1.weight"].dtype == torch.float32
            found.append({name: value.bfloat16() for name, value in weights.items()})
    assert farthest(found[1], found[2]) == 0
    assert farthest(found[0], found[2]) < 0.02


def alone(rank: int, world: int, folder: str) -> list[list[float]]:
    """Without torch.distributed, as `python script.py` starts it."""
    found = []
    for stage in (0, *STAGES):
        with launched(0, 1):
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                del os.environ[name]
            script = Script(build(stage)).train(clip=0.1)
            script.accelerator.save_state(folder)
            script.accelerator.load_state(folder)
            found.append(script.losses + script.norms)
    return found


@pytest.mark.slow
def test_one_process_trains_alone(tmp_path: Path) -> None:
    [[expected, *found]] = ranks.run(alone, bare=True, args=(str(tmp_path),))
    assert all(one == pytest.approx(expected, rel=1e-5) for one in found)


@pytest.mark.parametrize("stage", [2, 3])
@ranks.on(2)
def test_a_checkpoint_takes_a_prepared_optimizer(rank: int, world: int, tmp_path: Path, stage: int) -> None:
    with launched(rank, world):
        first, second = (Script(build(stage)) for _ in range(2))
        first.train(stop=2)
        zero.checkpoint.save(tmp_path / "run", first.model, first.optimizer)
        zero.checkpoint.load(tmp_path / "run", second.model, second.optimizer)
        found, expected = (zero.full_optimizer_state_dict(one.model, one.optimizer)["state"] for one in (second, first))
    assert expected
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


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
def test_ranks_that_accelerate_would_train_apart_are_refused(initialised: bool) -> None:
    for error in (told for found in ranks.run(apart, args=(2,), bare=not initialised) for told in found):
        assert error.startswith("RuntimeError: Accelerate found one process"), error
        assert "2 ranks" in error and "Accelerator(cpu=True)" in error
    if not initialised:  # one process of a launcher is not
        assert ranks.run(apart, args=(1,), bare=True) == [[""] * 4]


def pairs(*stages: int) -> list[tuple[int, int]]:
    few = [*zip(stages, stages[::-1], strict=True), (3, 3)]
    return [*itertools.product(stages, stages)] if matrix.WHOLE else few


def in_shards(plugin: ZeroPlugin) -> ZeroPlugin:
    return replace(plugin, state_dict_type="SHARDED_STATE_DICT")


KINDS: dict[str, tuple[Callable[[int], ZeroPlugin], list[tuple[int, int]]]] = {
    "full": (lambda stage: ZeroPlugin(stage=stage), pairs(0, *STAGES)),
    "sharded": (lambda stage: in_shards(ZeroPlugin(stage=stage)), pairs(*STAGES)),
    "full, with masters": (in_sixteen_bits, [(2, 2), (2, 3)]),
    "sharded, with masters": (lambda stage: in_shards(in_sixteen_bits(stage)), [(2, 3), (3, 2)]),
}
"""The plugin at a stage; the stages that save, and that go on from there bit for bit."""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@ranks.on(2, timeout=100)
def test_a_state_goes_on_bit_for_bit_at_any_stage_and_without_zero(
    rank: int, world: int, tmp_path: Path, kind: str
) -> None:
    plugin, every = KINDS[kind]
    dtype = torch.bfloat16 if "masters" in kind else torch.float32

    def started(stage: int) -> Script:
        return Script(build(stage, **({"zero_plugin": plugin(stage)} if stage else {})))

    with launched(rank, world):
        expected = started(every[0][0]).train()
        expected_weights = {name: value.to(dtype) for name, value in expected.weights().items()}
    for first in dict(every):
        place = shared_folder(tmp_path, str(first))
        with launched(rank, world):
            script = started(first).train(stop=2)
            script.accelerator.save_state(str(place))
            script.accelerator.wait_for_everyone()
    for first, second in every:
        with launched(rank, world):
            again = started(second)
            again.accelerator.load_state(f"{tmp_path}/{first}")
            again.train(start=2)
            got = {name: value.to(dtype) for name, value in again.weights().items()}
        assert again.losses == expected.losses[2:], (first, second)
        assert farthest(got, expected_weights) == 0, (first, second)


@ranks.on(2)
def test_saved_weights_are_all_there_and_load_into_the_plain_model(rank: int, world: int, tmp_path: Path) -> None:
    sixteen = ZeroPlugin(stage=3, save_16bit_model=True, mixed_precision="bf16")
    for title, plugin in {1: 1, 2: 2, 3: 3, "16 bits": sixteen}.items():
        with launched(rank, world):
            script = Script(build(3, zero_plugin=plugin)).train(stop=1)
            place = Path(tmp_path, str(title))
            script.accelerator.save_model(script.model, str(place), max_shard_size="20KB" if title == 3 else "1GB")
            expected = script.weights()
            assert type(script.accelerator.unwrap_model(script.model)) is GPT
        files = [*place.glob("*.safetensors")]
        assert (len(files) > 1) == (title == 3)
        found = {name: value for file in files for name, value in load_file(file).items()}
        assert {value.dtype for value in found.values()} == {torch.bfloat16 if title == "16 bits" else torch.float32}
        assert title == "16 bits" or all(torch.equal(value, expected[name]) for name, value in found.items())
        missing, unexpected = GPT().load_state_dict(found, strict=False)
        assert (missing, unexpected) == (["head.weight"], [])  # tied to the embedding


def two_models(accelerator: Any) -> Weights:
    """Two models that train at once, whose gradients are clipped as one vector."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    for step in range(3):
        x = data(4, 5, rank=accelerator.process_index, step=step)
        accelerator.backward((first(x) - second(x)).square().sum())
        accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    trained = {"first": accelerator.get_state_dict(first), "second": accelerator.get_state_dict(second)}
    return {f"{one}.{name}": value.clone() for one, found in trained.items() for name, value in found.items()}


def reduced_late(accelerator: Any) -> Weights:
    """Several forwards under no_sync, of which the last backward sends the gradients."""
    script = Script(accelerator, optim=torch.optim.SGD)  # Adam's steps would be far apart for gradients that are not
    for (tokens,) in script.loader:
        with accelerator.no_sync(script.model):
            losses = [script.loss(part) for part in tokens.chunk(2)]
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(script.model):
            accelerator.backward(losses[1])
        script.optimizer.step()
        script.optimizer.zero_grad()
    return script.weights()


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_calls_beside_the_loop(rank: int, world: int, stage: int, tmp_path: Path) -> None:
    for call in (two_models, reduced_late):
        with launched(rank, world):
            expected = call(build(0))
        with launched(rank, world):
            assert farthest(call(build(stage)), expected) <= 1e-6
    with launched(rank, world):
        accelerator = build(stage)
        script = Script(accelerator)
        hooked = []
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: hooked.append((models, len(weights))))
        part = [*script.model.parameters()][:2]
        script.loss(next(iter(script.loader))[0]).backward()
        if stage > 1:
            assert "of the full model" in ranks.refusal(lambda: accelerator.clip_grad_norm_(part, 1.0))
            assert "sharded" in ranks.refusal(lambda: accelerator.clip_grad_value_(part, 1.0))
        else:
            accelerator.clip_grad_norm_(part, 1.0)
            accelerator.clip_grad_value_(part, 1.0)
        assert accelerator.prepare(script.model) is script.model
        assert len(accelerator._models) == 1
        evaluated = GPT().eval().requires_grad_(False)
        assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
        accelerator._models.pop()
        accelerator.save_state(str(tmp_path))
        assert hooked == [([script.model], 1)]
        model, optimizer = accelerator.free_memory(script.model, script.optimizer)
        assert model is None and optimizer is None and accelerator._models == []


@ranks.on(2)
def test_other_orders_and_values_on_rank_0_only(rank: int, world: int) -> None:
    """Models that are prepared in another order than the usual one, or have their values on rank 0 only."""
    for stage in STAGES:
        with launched(rank, world):
            accelerator = build(stage)
            model = GPT()
            optimizer = accelerator.prepare(AdamW(model.parameters(), lr=1e-2))
            model = accelerator.prepare(model)
            before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
            tokens = torch.randint(VOCABULARY, (2, CONTEXT))
            accelerator.backward(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
            optimizer.step()
            after = accelerator.get_state_dict(model)
            assert not any(torch.equal(before[name], after[name]) for name in before if "bias" not in name)
            assert zero.count_parameters(model).all == sum(param.numel() for param in GPT().parameters())
    with launched(rank, world):
        torch.manual_seed(0)
        expected = GPT().state_dict()
        torch.manual_seed(0)
        with torch.device("meta") if rank else nullcontext():
            model = GPT()
        accelerator = build(3)
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        assert farthest(accelerator.get_state_dict(model), expected) == 0


@pytest.mark.slow
@ranks.on(2)
def test_torch_compile_lies_inside(rank: int, world: int) -> None:
    """Autocast and torch.compile lie inside of what shards the model."""
    found = []
    for stage in (0, 3):
        with launched(rank, world):
            options = {"dynamo_backend": "eager", "mixed_precision": "bf16"}
            script = Script(build(stage, **options), model=partial(GPT, layers=2)).train(stop=1)
            assert stage == 0 or script.accelerator.unwrap_model(script.model)._compiled_call_impl is not None
            found.append(script.losses)
    assert found[0] == found[1]


@pytest.mark.slow
@ranks.on(2)
def test_states_of_compiled_blocks_have_the_names_of_the_plain_model(rank: int, world: int, tmp_path: Path) -> None:
    """Blocks that Accelerate compiles one by one. Files have the names of the plain model, and load into either."""
    for stage in (2, 3):
        dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        place = shared_folder(tmp_path, str(stage))
        for options in ({"dynamo_plugin": dynamo}, {}):
            with launched(rank, world):
                script = Script(build(stage, **options), model=partial(GPT, layers=2))
                inner = script.accelerator.unwrap_model(script.model)
                assert any("_orig_mod" in name for name, _ in inner.named_parameters()) == bool(options)
                if options:
                    weights = script.train(stop=1).weights()
                    assert weights.keys() == GPT(layers=2).state_dict().keys()
                    script.accelerator.save_state(str(place))
                script.accelerator.load_state(str(place))
                assert farthest(script.weights(), weights) == 0


@ranks.on(2)
def test_what_cannot_be_is_refused_on_every_rank(rank: int, world: int) -> None:
    def wrapping(**plugin: Any) -> Callable[[], Any]:
        return lambda: Script(build(3, zero_plugin=ZeroPlugin(stage=3, **plugin)))

    def optimizer_first() -> None:
        accelerator, model = build(2, zero_plugin=masters), GPT()
        accelerator.prepare(AdamW(model.parameters()))
        accelerator.prepare(model)

    loader = DataLoader(range(8), batch_size=2)
    transformer, micro = "TRANSFORMER_BASED_WRAP", ZeroPlugin(stage=2, micro_batch_size=4)
    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    masters, without = in_sixteen_bits(2), ZeroPlugin(stage=2, mixed_precision="no")
    accumulating = GradientAccumulationPlugin(num_steps=2)
    told: dict[str, Callable[[], Any]] = {
        "Prepare both in one call": lambda: build(2).prepare(GPT()),
        "an optimizer was prepared before its model": optimizer_first,
        "no stage to shard at was given": lambda: build(2, zero_plugin=None),
        "parallelism_config is not available": lambda: build(2, parallelism_config=object()),
        "'fp8' is not available": lambda: build(2, mixed_precision="fp8"),
        "mixed_precision='bf16' was passed": lambda: build(2, mixed_precision="bf16", zero_plugin=without),
        "train_micro_batch_size_per_gpu is 4": lambda: build(2, zero_plugin=micro).prepare(loader),
        "GradientAccumulationPlugin(num_steps=2)": lambda: build(
            2, gradient_accumulation_plugin=accumulating, zero_plugin=replace(without, gradient_accumulation_steps=4)
        ),
        "is for stage 1": lambda: Script(build(2, kwargs_handlers=[hook])),
        "names Blok, of which GPT has no module": wrapping(
            auto_wrap_policy=transformer, transformer_cls_names_to_wrap=("Blok",)
        ),
        "which is empty": wrapping(auto_wrap_policy=transformer),
        "shards within 3 ranks": wrapping(sharding_strategy="HYBRID_SHARD", shard_size=3),
        "both say how to shard": lambda: build(2, fsdp_plugin=object()),
    }
    for expected, call in told.items():
        with launched(rank, world):
            error = ranks.refusal(call)
        assert error.startswith("ValueError") and expected in error, error
