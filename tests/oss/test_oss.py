"""Stage 1 beside DistributedDataParallel with the plain optimizer: the same losses and parameters, bit for bit."""

import functools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import matrix
import ranks
from models import take_step
from optimizers import Lamb
from reference import (
    ELEMENTWISE,
    MOMENTUM,
    MyAdam,
    Net,
    batch,
    built,
    distributed,
    filled,
    loss_of,
    matrices,
    pair,
    same,
    same_weights,
    train,
)
from zero import OSS, ShardedDDP


def adam_by_factory(params, **options):
    return Adam(params, **options)


# What is stepped, its options, and the cut that "auto" should choose for it.
OPTIMIZERS = {
    **{name: (*given, "even") for name, given in ELEMENTWISE.items()},
    "SGD foreach": (SGD, {**MOMENTUM, "foreach": True}, "even"),
    "SGD fused": (SGD, {**MOMENTUM, "fused": True}, "even"),
    "Adam foreach": (Adam, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}, "even"),
    "Adam fused": (Adam, {"lr": 0.01, "amsgrad": True, "fused": True}, "even"),
    "AdamW fused": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}, "even"),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}, "even"),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}, "whole"),
    "LAMB by hand": (Lamb, {"lr": 0.1}, "whole"),
    "a subclass of Adam": (MyAdam, {"lr": 0.01}, "even"),
    "partial": (functools.partial(Adam, lr=0.01, amsgrad=True), {}, "even"),
    "partial of partial": (functools.partial(functools.partial(Lamb, lr=0.5), lr=0.1), {}, "whole"),
    "a function": (adam_by_factory, {"lr": 0.01}, "even"),
}
OPTIMIZERS["Muon"] = (torch.optim.Muon, {"lr": 0.1, "weight_decay": 0.1}, "whole")
MODELS = {"Adafactor": filled, "Muon": matrices}  # what these cannot take is left out


def is_cut(optimizer):
    """Whether any parameter has shards on several ranks."""
    for flat in optimizer.shards.shard_groups:
        if any(0 < span.numel < flat.layout.numels[span.index] for span in flat.spans.values()):
            return True
    return False


def assert_equal_training(rank, plain, sharded, **options):
    expected = train(*plain, rank, **options)
    same(train(*sharded, rank, **options), expected, "the losses")
    same_weights(sharded[0], plain[0])
    assert expected[0] != expected[-1]


# ---------------------------------------------------------------------------------------------- Whatever the optimizer


def _optimizers(rank, world, name, partition):
    optim, options, auto = OPTIMIZERS[name]
    plain, sharded = pair(optim, partition, MODELS.get(name, Net), **options)
    cut = auto if partition == "auto" else partition
    assert is_cut(sharded[1]) == (cut == "even")
    assert_equal_training(rank, plain, sharded)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_the_plain_optimizer_does_bit_for_bit(name):
    ranks.run(_optimizers, 2, args=(name, "auto"))


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "LAMB by hand"])
@ranks.on(2)
def test_optimizers_of_whole_parameters_train_so_at_stage_2_too(rank, world, name):
    optim, options, _ = OPTIMIZERS[name]
    make = MODELS.get(name, Net)
    model, inner = distributed(built(make)), built(make)
    optimizer = OSS(inner.parameters(), optim, **options)
    assert not is_cut(optimizer)
    assert_equal_training(
        rank, (model, optim(model.parameters(), **options)), (ShardedDDP(inner, optimizer), optimizer)
    )


@matrix.combined(
    "name, partition", ["SGD momentum", "AdamW amsgrad", "a subclass of Adam", "a function"], ["even", "whole"]
)
def test_trains_the_same_under_the_partition_that_was_asked_for(name, partition):
    ranks.run(_optimizers, 2, args=(name, partition))


@matrix.combined("dtype, partition", [torch.float32, torch.bfloat16, torch.float64], ["even", "whole"])
@ranks.on(2)
def test_trains_the_same_in_several_flat_groups_and_other_precisions(rank, world, partition, dtype):
    """Enough for several shard groups, the first parameter larger than one of them."""

    def make():
        return nn.Sequential(nn.Linear(24, 20_000), nn.Linear(20_000, 3), nn.Linear(3, 5)).to(dtype)

    (model, plain), (sharded_model, sharded) = pair(AdamW, partition, make, lr=0.01)
    assert len(sharded.shards.shard_groups) > 1
    for step in range(3):
        for each, optimizer in ((model, plain), (sharded_model, sharded)):
            take_step(optimizer, each(batch(rank, step).to(dtype)).square().mean())
    same_weights(sharded_model, model)


@ranks.on(2)
def test_trains_the_same_with_several_dtypes_in_one_model(rank, world):
    class Mixed(Net):
        def __init__(self):
            super().__init__()
            self.first.double()
            self.tied.bias.data = self.tied.bias.data.bfloat16()

        def forward(self, inputs):
            hidden = self.norm(torch.tanh(self.first(inputs.double()).float()) + self.frozen)
            hidden = nn.functional.linear(self.middle(hidden), self.tied.weight, self.tied.bias.float()) * self.scale
            return hidden @ self.transposed.t() + self.nothing.sum() + self.conv(hidden.unsqueeze(1)).mean()

    plain, sharded = pair(SGD, make=Mixed, **MOMENTUM)
    assert len({flat.full.dtype for flat in sharded[1].shards.shard_groups}) == 3
    assert_equal_training(rank, plain, sharded)


# -------------------------------------------------------------------------------------------------- Whatever the group


def close(got, expected):
    for (name, one), (_, other) in zip(got.named_parameters(), expected.named_parameters(), strict=True):
        assert (one - other).abs().max() <= 2e-6 * max(other.abs().max(), 1) if one.numel() else True, name


def tiny():
    """Fewer parameters than ranks, and fewer elements than ranks in each."""
    return nn.Sequential(nn.Linear(24, 1, bias=False), nn.LayerNorm(1))


@matrix.combined("world, make, partition", [1, 3, 4], [Net, tiny], ["even", "whole"])
@ranks.on("world")
def test_trains_the_same_within_rounding_on_other_numbers_of_ranks(rank, world, make, partition):
    plain, sharded = pair(SGD, partition, make, **MOMENTUM)
    losses = train(*plain, rank)
    assert train(*sharded, rank) == pytest.approx(losses, rel=2e-6)
    close(sharded[0], plain[0])


@ranks.on(bare=True)
def test_trains_the_same_without_a_process_group(rank, world):
    plain, sharded = pair(Adam, lr=0.01)
    assert_equal_training(rank, plain, sharded)
    same(sharded[1].state_dict(), plain[1].state_dict(), "the state")


# -------------------------------------------------------------------------------------- Whatever the user does with it


def _groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
        {"params": [p for p in model.parameters() if p.dim() >= 2], "momentum": 0.5},
    ]


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_parameter_groups_keep_their_own_options(rank, world, partition):
    assert_equal_training(rank, *pair(SGD, partition, params=_groups_of, **MOMENTUM))


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR of momentum", "OneCycleLR of betas"])
@ranks.on(2)
def test_schedulers_reach_the_optimizer(rank, world, name):
    make = {
        "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
        "OneCycleLR of momentum": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=6),
        "OneCycleLR of betas": lambda optimizer: OneCycleLR(optimizer, max_lr=0.02, total_steps=6),
    }[name]
    optim, options = (AdamW, {"lr": 0.01}) if "betas" in name else (SGD, MOMENTUM)
    for_plain, for_sharded = pair(optim, **options)
    seen = []
    for model, optimizer in (for_plain, for_sharded):
        schedule = make(optimizer)
        rates = []

        def after(optimizer, step, schedule=schedule, rates=rates):
            schedule.step()
            (group,) = optimizer.param_groups
            rates.append((group["lr"], group.get("momentum"), group.get("betas")))

        losses = train(model, optimizer, rank, after=after)
        seen.append((losses, rates, schedule.get_last_lr()))
    same(seen[1], seen[0], "losses, options and schedule")
    assert len(set(seen[0][1])) > 2, "the schedule changed nothing"
    same_weights(for_sharded[0], for_plain[0])


@ranks.on(2)
def test_options_changed_by_hand_reach_the_optimizer(rank, world):
    plain, sharded = pair(SGD, **MOMENTUM)

    def after(optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["momentum"] = 0.1 * step

    assert_equal_training(rank, plain, sharded, after=after)
    same(sharded[1].defaults, plain[1].defaults, "the defaults")


class Cooling(SGD):
    """Changes its own options, as optimizers do that choose their learning rate."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5
        return loss


@ranks.on(2)
def test_options_that_the_optimizer_itself_changes_are_seen(rank, world):
    rates = []
    for model, optimizer in pair(Cooling, **MOMENTUM):
        rates.append([])
        train(model, optimizer, rank, after=lambda of, _: rates[-1].append(of.param_groups[0]["lr"]))
    assert rates[0] == rates[1] == [0.1 * 0.5 ** (step + 1) for step in range(5)]


@pytest.mark.parametrize("partition", ["even", "whole"])
@ranks.on(2)
def test_parameters_may_be_added_after_some_steps(rank, world, partition):
    both = pair(SGD, partition, params=lambda model: model.module.first.parameters(), **MOMENTUM)
    assert_equal_training(rank, *both, steps=range(2))
    for model, optimizer in both:
        inner = model.module
        optimizer.add_param_group({"params": [inner.middle.weight, inner.scale], "lr": 0.01})
        optimizer.add_param_group({"params": inner.norm.parameters(), "nesterov": True})
        optimizer.add_param_group({"params": inner.transposed})
    keys = [[(set(group), len(group["params"])) for group in optimizer.param_groups] for _, optimizer in both]
    assert keys[0] == keys[1]
    assert_equal_training(rank, *both, steps=range(2, 5))
    (_, plain), (_, sharded) = both
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")


@ranks.on(2)
def test_adding_parameters_keeps_what_a_scheduler_has_set_since_the_last_step(rank, world):
    both = pair(SGD, params=lambda model: model.module.first.parameters(), **MOMENTUM)
    rates = []
    for model, optimizer in both:
        schedule = StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, rank, range(2), after=lambda *_, schedule=schedule: schedule.step())
        optimizer.add_param_group({"params": model.module.middle.parameters()})
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[1] == rates[0] == [0.025, 0.1]
    assert_equal_training(rank, *both, steps=range(2, 4))


@pytest.mark.parametrize("master_dtype", [None, torch.float32])
@ranks.on(2)
def test_zero_grad_of_the_model_frees_the_gradients(rank, world, master_dtype):
    model = built(lambda: nn.Linear(24, 40).bfloat16())
    optimizer = OSS(model.parameters(), SGD, master_dtype=master_dtype, **MOMENTUM)
    for use in (lambda: optimizer.clip_grad_norm(0.1), optimizer.step):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        held = [StorageWeakRef(param.grad.untyped_storage()) for param in model.parameters()]
        use()
        assert all(optimizer.part(param).grad is None for param in model.parameters())
        model.zero_grad()
        assert all(one.expired() for one in held)


@ranks.on(2)
def test_named_parameters_are_taken_as_torch_takes_them(rank, world):
    both = pair(SGD, params=lambda model: model.module.named_parameters(), **MOMENTUM)
    (_, plain), (_, sharded) = both
    assert sharded.param_groups[0]["param_names"] == plain.param_groups[0]["param_names"]
    assert_equal_training(rank, *both)
    sharded.consolidate_state_dict(to=None)
    same(sharded.state_dict(), plain.state_dict(), "the state")


@ranks.on(2)
def test_tied_weights_stay_one_parameter(rank, world):
    model = built()
    optimizer = OSS(model.parameters(), SGD, **MOMENTUM)
    assert model.tied.weight is model.middle.weight
    assert sum(param is model.tied.weight for group in optimizer.param_groups for param in group["params"]) == 1
    train(distributed(model), optimizer, rank, range(2))
    assert model.tied.weight is model.middle.weight


@ranks.on(2)
def test_is_an_optimizer_of_the_users_own_parameters(rank, world):
    model = distributed(built())
    optimizer = OSS(model.parameters(), Adam, lr=0.01)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert isinstance(optimizer, torch.optim.Optimizer)
    for param, given in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True):
        assert param is given
    train(model, optimizer, rank, range(2))
    assert calls == ["before", "after"] * 2


def _shards(rank, world):
    """The shard of a parameter is what the inner optimizer steps: it lies in the parameter itself."""
    model = distributed(built())
    optimizer = OSS(model.parameters(), SGD, lr=1.0)
    loss_of(model, rank, 0).backward()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    owned = 0
    for param in model.parameters():
        shard = optimizer.part(param)
        owned += shard.numel()
        first, last = param.data_ptr(), param.data_ptr() + param.nbytes
        assert first <= shard.data_ptr() <= shard.data_ptr() + shard.nbytes <= last or not shard.numel()
    for param, old in zip(model.parameters(), before, strict=True):
        gradient = param.grad if param.grad is not None else torch.zeros_like(param)
        same(param.detach(), old - gradient, "a parameter")
    return owned, sum(param.numel() for param in model.parameters())


def test_ranks_own_all_elements_once():
    told = ranks.run(_shards, 3)
    assert sum(owned for owned, _ in told) == told[0][1]


# ------------------------------------------------------------------------------------------------------ What it is for


def _state_bytes(rank, world, partition):
    def storages(optimizer):
        tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}

    def make():
        return nn.Sequential(*(nn.Linear(24, 24) for _ in range(8)), nn.Linear(24, 700))

    plain, sharded = pair(Adam, partition, make, lr=0.01)
    train(*plain, rank, range(1))
    train(*sharded, rank, range(1))
    own, whole = (storages(optimizer) for optimizer in (sharded[1].optim, plain[1]))
    assert storages(sharded[1]).items() <= own.items(), "state is kept twice"
    return sum(own.values()), sum(whole.values())


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_keeps_its_share_of_the_state(world):
    told = ranks.run(_state_bytes, world, args=("even",))
    whole = told[0][1]
    assert sum(own for own, _ in told) == whole
    assert max(own for own, _ in told) <= 1.02 * whole / world


def test_whole_parameters_are_shared_out_as_evenly_as_they_can():
    told = ranks.run(_state_bytes, 2, args=("whole",))
    assert sum(own for own, _ in told) == told[0][1]
    assert max(own for own, _ in told) == 2 * 4 * 24 * 700  # one matrix is more than all else
