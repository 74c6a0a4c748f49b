"""Scripts as Accelerate's users write them, at stages 1, 2 and 3, against Accelerate itself, which is DDP."""

from __future__ import annotations

import os
import tempfile
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
from models import CONTEXT, GPT, VOCABULARY
from zero.integrations.accelerate import Accelerator, ZeroPlugin
from zero.integrations.accelerate.sharding import Sharding

STAGES = (1, 2, 3)
Weights = dict[str, Tensor]


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


@ranks.on(2)
def test_losses_and_weights_are_those_of_ddp_bit_for_bit(rank: int, world: int, tmp_path: Path) -> None:
    differences = []
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plainly": ({}, {}),
        "accumulating": ({"gradient_accumulation_steps": 2}, {}),
        "in bf16": ({"mixed_precision": "bf16"}, {}),
        "with dropout and checkpoints": ({}, {"model": WithDropout}),
        "with an optimizer of whole matrices": ({}, {"optim": torch.optim.Adafactor}),
    }
    for how, (options, script) in ways.items():
        with launched(rank, world):
            torch.manual_seed(0)
            expected = Script(build(0, **options), **script).train()
            expected_weights = expected.weights()
        recomputing = ZeroPlugin(stage=3, activation_checkpointing=True)
        hybrid = ZeroPlugin(stage=3, sharding_strategy="HYBRID_SHARD", shard_size=1)
        on_disk = [ZeroPlugin(stage=stage, offload=zero.DiskOffload(tmp_path)) for stage in STAGES]
        for plugin in (*STAGES, *([0, recomputing, hybrid, *on_disk] if how == "plainly" else [])):
            with launched(rank, world):
                got = Script(build(3, **options, zero_plugin=plugin), **script).train()
                if got.losses != expected.losses or farthest(got.weights(), expected_weights):
                    differences.append(f"stage {plugin}, {how}")
    assert differences == []


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


@ranks.on(2)
def test_parameters_in_float16_skip_the_same_steps_at_every_stage(rank: int, world: int) -> None:
    found = []
    for stage in STAGES:
        with launched(rank, world):
            accelerator = build(stage, zero_plugin=ZeroPlugin(stage=stage, master_dtype=torch.float32))
            accelerator.state._mixed_precision = "fp16"  # which Accelerate offers on GPUs only
            accelerator.scaler = zero.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
            accelerator.sharding = Sharding(accelerator.zero_plugin, accelerator.device, torch.float16)
            script = Script(accelerator).train(clip=0.1)
            assert {param.dtype for param in script.model.parameters()} == {
                torch.float32 if stage == 3 else torch.float16
            }
            found.append((script.losses, accelerator.scaler.get_scale()))
    (losses, scale), *others = found
    assert scale < 2.0**18
    assert all(own == pytest.approx(losses, rel=0.01) and other == scale for own, other in others)


@pytest.mark.parametrize("clip", [None, 0.1])
@ranks.on(2)
def test_loss_scaling_skips_the_steps_that_ddp_skips(rank: int, world: int, clip: float | None) -> None:
    """Training in float16, of which the first steps overflow. Accelerate itself offers it on GPUs only."""
    found = []
    for stage in (0, *STAGES):
        with launched(rank, world):
            accelerator = build(stage)
            accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
            scaler = zero.GradScaler if stage else torch.amp.GradScaler
            accelerator.scaler = scaler("cpu", init_scale=2.0**18, growth_interval=2)
            script = Script(accelerator).train(clip=clip)
            found.append((script.losses, accelerator.scaler.get_scale(), script.weights()))
    (losses, scale, weights), *others = found
    assert scale < 2.0**18
    for other in others:
        assert other[1] == scale
        assert other[0] == pytest.approx(losses, abs=1e-6 if clip else 0)
        assert farthest(other[2], weights) <= (1e-6 if clip else 0)


def in_sixteen_bits(stage: int, **more: Any) -> ZeroPlugin:
    return ZeroPlugin.from_json({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, **more})


def with_masters(rank: int, world: int, script: Script) -> tuple[list[float], Weights]:
    """What the script is to do: parameters in bfloat16, gradients averaged and masters stepped in float32."""
    torch.manual_seed(0)
    model = GPT().bfloat16()
    masters = [param.detach().float() for param in model.parameters()]
    optimizer = AdamW(masters, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for (tokens,) in script.loader:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
            dist.all_reduce(master.grad)
            master.grad /= world
        optimizer.step()
        for _ in range(world):  # as Accelerate does
            scheduler.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
    return losses, model.state_dict()


@ranks.on(2)
def test_configurations_of_deepspeed_have_parameters_of_16_bits_and_masters_in_shards(rank: int, world: int) -> None:
    size = sum(param.numel() for param in GPT().parameters())
    for stage in STAGES:
        with launched(rank, world):
            script = Script(build(stage, zero_plugin=in_sixteen_bits(stage)))
            losses, weights = with_masters(rank, world, script)
            script.train()
            # DistributedDataParallel rounds the averages of stage 1 to 16 bits.
            assert script.losses == (losses if stage > 1 else pytest.approx(losses, rel=0.02))
            got = {name: value.bfloat16() for name, value in script.weights().items()}
            assert farthest(got, weights) <= (0.02 if stage == 1 else 0)
            script.loss(next(iter(script.loader))[0]).backward()
            held = zero.report(script.model, script.optimizer)
            bytes_of = [held.parameters / size, held.gradients / size, held.optimizer / size]
        # Of a parameter: 2 bytes, 2 of the gradient, and in shards 4 of the master, 8 of Adam, 4 of the gradient.
        expected = {1: [2, 2, 12 / 2], 2: [2, 4 / 2, 12 / 2], 3: [4 / 2, 4 / 2, 8 / 2]}[stage]
        assert bytes_of == pytest.approx(expected, rel=0.05)


class Normed(nn.Sequential):
    """Has buffers, and inputs that are to be cast."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.register_buffer("offset", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offset)


@ranks.on(2)
def test_all_of_a_model_in_16_bits_but_batch_normalisation(rank: int, world: int) -> None:
    found = []
    for stage in STAGES:
        with launched(rank, world):
            accelerator = build(stage, zero_plugin=in_sixteen_bits(stage))
            torch.manual_seed(0)
            plain = Normed().to(torch.bfloat16 if stage == 3 else torch.float32)  # as files have it
            model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
            for step in range(3):
                torch.manual_seed(2 * step + rank)
                output = model(torch.randn(4, 5))
                assert output.dtype == torch.bfloat16
                accelerator.backward(output.float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
            weights = accelerator.get_state_dict(model)
            assert weights["1.running_mean"].dtype == weights["1.weight"].dtype == torch.float32
            found.append({name: value.bfloat16() for name, value in weights.items()})
    assert farthest(found[1], found[2]) == 0
    assert farthest(found[0], found[2]) < 0.02


@ranks.on(2)
def test_masters_are_saved_and_go_on_at_another_stage(rank: int, world: int, tmp_path: Path) -> None:
    with launched(rank, world):
        script = Script(build(2, zero_plugin=in_sixteen_bits(2))).train()
        expected = {name: value.bfloat16() for name, value in script.weights().items()}
    for kind, stages in {"FULL_STATE_DICT": (2, 2, 3), "SHARDED_STATE_DICT": (2, 3, 2)}.items():
        place = shared_folder(tmp_path, kind)
        for stop, stage in zip((2, 3, 4), stages, strict=True):
            with launched(rank, world):
                plugin = replace(in_sixteen_bits(stage), state_dict_type=kind)
                again = Script(build(stage, zero_plugin=plugin))
                if stop > 2:
                    again.accelerator.load_state(str(place))
                again.train(start=stop - 1 if stop > 2 else 0, stop=stop)
                again.accelerator.save_state(str(place))
                again.accelerator.wait_for_everyone()
                got = {name: value.bfloat16() for name, value in again.weights().items()}
        assert again.losses == script.losses[3:]
        assert farthest(got, expected) == 0


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


def test_one_process_trains_alone(tmp_path: Path) -> None:
    [[expected, *found]] = ranks.run(alone, bare=True, args=(str(tmp_path),))
    assert all(one == pytest.approx(expected, rel=1e-5) for one in found)


@ranks.on(2)
def test_a_report_knows_what_accelerate_has_prepared(rank: int, world: int) -> None:
    found = []
    for stage in (1, 3):
        with launched(rank, world):
            script = Script(build(stage, zero_plugin=stage)).train(stop=1)
            tokens = next(iter(script.loader))[0]
            script.accelerator.backward(script.loss(tokens))
            told = zero.report(script.model, script.optimizer)
            found.append((told.stage, told.gradients, told.optimizer))
    stages, gradients, states = zip(*found, strict=True)
    assert stages == ("1", "3")
    full = sum(param.nbytes for param in GPT().parameters())
    assert gradients == pytest.approx((full, full / 2), rel=0.05)
    assert states == pytest.approx((2 * full / 2, 2 * full / 2), rel=0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_checkpoint_takes_the_optimizer_that_accelerate_has_prepared(
    rank: int, world: int, tmp_path: Path, stage: int
) -> None:
    with launched(rank, world):
        scripts = [Script(build(stage, zero_plugin=stage)) for _ in range(2)]
        scripts[0].train(stop=2)
        zero.checkpoint.save(tmp_path / "run", scripts[0].model, scripts[0].optimizer)
        zero.checkpoint.load(tmp_path / "run", scripts[1].model, scripts[1].optimizer)
        found, expected = (zero.full_optimizer_state_dict(one.model, one.optimizer)["state"] for one in scripts[::-1])
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
    for found in ranks.run(apart, args=(2,), bare=not initialised):
        for error in found:
            assert error.startswith("RuntimeError: Accelerate found one process (DistributedType.NO), but"), error
            assert "there are 2 ranks" in error
            assert "Accelerator(cpu=True)" in error


def test_one_process_of_a_launcher_is_not_refused() -> None:
    assert ranks.run(apart, args=(1,), bare=True) == [[""] * 4]


# --------------------------------------------------------------------------------------------------- states


@pytest.mark.matrix
@ranks.on(2, timeout=100)
def test_a_state_goes_on_bit_for_bit_at_any_stage_and_without_zero(rank: int, world: int, tmp_path: Path) -> None:
    with launched(rank, world):
        expected = Script(build(0)).train()
        expected_weights = expected.weights()
    wrong = []

    def go_on(stage: int, kind: str, place: Path, title: str) -> None:
        plugin = {"zero_plugin": ZeroPlugin(stage=stage, state_dict_type=kind)} if stage else {}
        with launched(rank, world):
            again = Script(build(stage, **plugin))
            again.accelerator.load_state(str(place))
            again.train(start=2)
            if again.losses != expected.losses[2:] or farthest(again.weights(), expected_weights):
                wrong.append(f"{title} at stage {stage}")

    for kind, stages in {"FULL_STATE_DICT": (0, *STAGES), "SHARDED_STATE_DICT": STAGES}.items():
        for stage in stages:
            place = shared_folder(tmp_path, f"{kind}{stage}")
            plugin = {"zero_plugin": ZeroPlugin(stage=stage, state_dict_type=kind)} if stage else {}
            with launched(rank, world):
                script = Script(build(stage, **plugin)).train(stop=2)
                script.accelerator.save_state(str(place))
                script.accelerator.wait_for_everyone()
            for other in stages if matrix.WHOLE else {stage, stages[-1 - stages.index(stage)]}:
                go_on(other, kind, place, f"{kind} of stage {stage}")
    assert wrong == []


@ranks.on(2)
def test_saved_weights_are_all_there_and_load_into_the_plain_model(rank: int, world: int, tmp_path: Path) -> None:
    found = {}
    sixteen = ZeroPlugin(stage=3, save_16bit_model=True, mixed_precision="bf16")
    for title, plugin in {1: 1, 2: 2, 3: 3, "16 bits": sixteen}.items():
        with launched(rank, world):
            script = Script(build(3, zero_plugin=plugin)).train(stop=1)
            place = Path(tmp_path, str(title))
            script.accelerator.save_model(script.model, str(place), max_shard_size="20KB" if title == 3 else "1GB")
            found[title] = {
                name: value for file in sorted(place.glob("*.safetensors")) for name, value in load_file(file).items()
            }
            expected = script.weights()
            plain = script.accelerator.unwrap_model(script.model)
            assert type(plain) is GPT
            names = {name for name in expected if name != "head.weight"}  # tied to the embedding
            assert found[title].keys() == names, found[title].keys() ^ names
            assert title == "16 bits" or all(torch.equal(found[title][name], expected[name]) for name in names)
    assert len({frozenset(weights) for weights in found.values()}) == 1
    assert len([*(tmp_path / "3").glob("*.safetensors")]) > 1
    assert {value.dtype for value in found["16 bits"].values()} == {torch.bfloat16}
    model = GPT()
    missing, unexpected = model.load_state_dict(found[2], strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert torch.equal(model.state_dict()["blocks.0.mlp.0.weight"], found[2]["blocks.0.mlp.0.weight"])


# ------------------------------------------------------------------------------------------- other calls


def launched_folder() -> Any:
    return tempfile.TemporaryDirectory() if torch.distributed.get_rank() == 0 else nullcontext("/tmp")


def two_models(accelerator: Any) -> list[Weights]:
    """Two models that train at once, whose gradients are clipped as one vector."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    for step in range(3):
        torch.manual_seed(2 * step + accelerator.process_index)
        x = torch.randn(4, 5)
        accelerator.backward((first(x) - second(x)).square().sum())
        accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [{name: value.clone() for name, value in accelerator.get_state_dict(one).items()} for one in (first, second)]


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
def test_calls_beside_the_loop(rank: int, world: int, stage: int) -> None:
    with launched(rank, world):
        two_models(build(0)), (expected := two_models(build(0)))
    with launched(rank, world):
        got = two_models(build(stage))
        assert all(farthest(one, other) <= 1e-6 for one, other in zip(got, expected, strict=True))
    with launched(rank, world):
        expected_weights = reduced_late(build(0))
    with launched(rank, world):
        assert farthest(reduced_late(build(stage)), expected_weights) <= 1e-6
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
        with launched_folder() as folder:
            accelerator.save_state(folder)
        assert hooked == [([script.model], 1)]
        model, optimizer = accelerator.free_memory(script.model, script.optimizer)
        assert model is None and optimizer is None and accelerator._models == []


@ranks.on(2)
def test_other_orders_and_values_on_rank_0_only(rank: int, world: int) -> None:
    """Models that are prepared in another order than the usual one, or have their values on rank 0 only."""
    right = []
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
            right.append(all(not torch.equal(before[name], after[name]) for name in before if "bias" not in name))
            right.append(zero.count_parameters(model).all == sum(param.numel() for param in GPT().parameters()))
    with launched(rank, world):
        torch.manual_seed(0)
        expected = GPT().state_dict()
        torch.manual_seed(0)
        with torch.device("meta") if rank else nullcontext():
            model = GPT()
        accelerator = build(3)
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        right.append(farthest(accelerator.get_state_dict(model), expected) == 0)
    assert all(right), right


@ranks.on(2)
def test_torch_compile_lies_inside(rank: int, world: int) -> None:
    """Autocast and torch.compile lie inside of what shards the model."""
    found = []
    for stage in (0, 3):
        with launched(rank, world):
            options = {"dynamo_backend": "eager", "mixed_precision": "bf16"}
            script = Script(build(stage, **options), model=partial(GPT, layers=2)).train(stop=1)
            assert stage == 0 or script.accelerator.unwrap_model(script.model)._compiled_call_impl is not None
            found.append(script.losses[-1])
    assert len({*found}) == 1, found


@ranks.on(2)
def test_states_of_compiled_blocks_have_the_names_of_the_plain_model(rank: int, world: int, tmp_path: Path) -> None:
    """Blocks that Accelerate compiles one by one. Files have the names of the plain model, and load into either."""
    plain = GPT().state_dict().keys()
    for stage in STAGES:
        dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        for options in ({"dynamo_plugin": dynamo}, {}):
            with launched(rank, world):
                script = Script(build(stage, **options))
                inner = script.accelerator.unwrap_model(script.model)
                assert any("_orig_mod" in name for name, _ in inner.named_parameters()) == bool(options)
                if options:
                    script.train(stop=1)
                    place = shared_folder(tmp_path, str(stage))
                    weights = script.weights()
                    assert weights.keys() == plain
                    script.accelerator.save_state(str(place))
                script.accelerator.load_state(str(place))
                assert all(torch.equal(value, weights[name]) for name, value in script.weights().items())


@ranks.on(2)
def test_what_cannot_be_is_refused_on_every_rank(rank: int, world: int) -> None:
    def trying(call: Callable[[], Any]) -> str:
        with launched(rank, world):
            return ranks.refusal(call)

    def wrapping(**plugin: Any) -> str:
        return trying(lambda: Script(build(3, zero_plugin=ZeroPlugin(stage=3, **plugin))))

    def optimizer_first() -> None:
        accelerator, model = build(2, zero_plugin=in_sixteen_bits(2)), GPT()
        accelerator.prepare(AdamW(model.parameters()))
        accelerator.prepare(model)

    loader = DataLoader(range(8), batch_size=2)
    transformer = "TRANSFORMER_BASED_WRAP"
    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    found = {
        "Prepare both in one call": trying(lambda: build(2).prepare(GPT())),
        "an optimizer was prepared before its model": trying(optimizer_first),
        "no stage to shard at was given": trying(lambda: build(2, zero_plugin=None)),
        "parallelism_config is not available": trying(lambda: build(2, parallelism_config=object())),
        "'fp8' is not available": trying(lambda: build(2, mixed_precision="fp8")),
        "mixed_precision='bf16' was passed": trying(
            lambda: build(2, mixed_precision="bf16", zero_plugin=ZeroPlugin(stage=2, mixed_precision="no"))
        ),
        "train_micro_batch_size_per_gpu is 4": trying(
            lambda: build(2, zero_plugin=ZeroPlugin(stage=2, micro_batch_size=4)).prepare(loader)
        ),
        "GradientAccumulationPlugin(num_steps=2)": trying(
            lambda: build(
                2,
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
                zero_plugin=ZeroPlugin(stage=2, gradient_accumulation_steps=4),
            )
        ),
        "is for stage 1": trying(lambda: Script(build(2, kwargs_handlers=[hook]))),
        "names Blok, of which GPT has no module": wrapping(
            auto_wrap_policy=transformer, transformer_cls_names_to_wrap=("Blok",)
        ),
        "which is empty": wrapping(auto_wrap_policy=transformer),
        "shards within 3 ranks": wrapping(sharding_strategy="HYBRID_SHARD", shard_size=3),
        "both say how to shard": trying(lambda: build(2, fsdp_plugin=object())),
    }
    for expected, error in found.items():
        assert error.startswith("ValueError") and expected in error, error
