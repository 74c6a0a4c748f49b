"""zero.EMA: at every stage the averages of torch's AveragedModel at stage 0, to the last bit."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import matrix
import ranks
import zero
from assertions import same
from zoo import data

STAGES = [0, 1, 2, 3]
OPTIMS = [partial(Adam, lr=0.01), partial(SGD, lr=0.1, momentum=0.9)]
HOW = ["plain", "disk", "bf16", "whole"]
DECAY = 0.8


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1, bias=False))
    made[3].bias.requires_grad_(False)
    return made


def setup(stage: int, optim: Any = OPTIMS[0], how: str = "plain", folder: Any = None) -> tuple[Any, Any, zero.EMA]:
    options: dict[str, Any] = {
        "disk": {"offload": zero.DiskOffload(folder)} if stage else {},
        "bf16": {"precision": "bf16"},
        "whole": {"partition": "whole"},
    }.get(how, {})
    made = net()
    model, optimizer = zero.setup(made, optim([p for p in made.parameters() if p.requires_grad]), stage, **options)
    return model, optimizer, zero.EMA(model, DECAY)


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    model(data(8, 6, rank=rank, step=number)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def averages(model: nn.Module, ema: zero.EMA) -> list[Tensor]:
    states = zero.full_optimizer_state_dict(model, ema, to=None)["state"].values()
    assert all(state.keys() == {"average"} for state in states)
    return [state["average"] for state in states]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Without buffers, of which each rank has its own until the next forward."""
    return {name: one for name, one in zero.full_state_dict(model, to=None).items() if not name.startswith("1.")}


def evaluated(model: nn.Module, rank: int) -> list[Any]:
    """The weights, and what the model returns. As it has a graph, units of stage 3 stay full."""
    found = copy.deepcopy(zero.full_state_dict(model, to=None))
    model.eval()
    returned = model(data(8, 6, rank=rank)).detach()
    model.train()
    return [found, returned]


def by_torch(rank: int, optim: Any) -> list[Any]:
    model, optimizer, _ = setup(0, optim)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    found = []
    for number in range(5):
        step(model, optimizer, rank, number)
        average.update_parameters(model.module)
        if number > 1:
            found += evaluated(average.module, rank)
    trained = [one for one in average.module.parameters() if one.requires_grad]
    return [found, [*map(Tensor.detach, trained)], zero.full_state_dict(model, to=None)]


def by_zero(rank: int, stage: int, optim: Any, how: str = "plain", folder: Any = None) -> list[Any]:
    model, optimizer, ema = setup(stage, optim, how, folder)
    found = []
    for number in range(5):
        step(model, optimizer, rank, number)
        if number == 1:
            evaluated(model, rank)
        with torch.inference_mode(number == 0):
            ema.update()
        if number > 1:
            with ema.swapped():
                found += evaluated(model, rank)
    return [found, averages(model, ema), zero.full_state_dict(model, to=None)]


@matrix.combined("optim, how, stage", OPTIMS, HOW, STAGES, each=2)
@ranks.on(2)
def test_the_averages_are_torchs_and_training_goes_on_from_the_weights(rank, world, optim, how, stage, tmp_path):
    if how != "bf16":
        found, expected = by_zero(rank, stage, optim, how, tmp_path), by_torch(rank, optim)
        same(found if rank == 0 else found[1], expected if rank == 0 else expected[1])  # buffers are each rank's own
    elif stage:  # stage 0 computes in other dtypes; masters are the shards of stage 3
        (found, average, _), (expected, masters, _) = (by_zero(rank, one, optim, how) for one in (stage, 3))
        same(average, masters)
        assert all(one.dtype == torch.float32 for one in average)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, dict):  # what no optimizer has is stored rounded at stages 1 and 2
                assert torch.equal(
                    one.pop("3.bias"), other.pop("3.bias") if stage == 3 else other.pop("3.bias").bfloat16()
                )
            same(one, other)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_a_rank_holds_its_shards_and_nothing_is_sent(rank, world, stage):
    model, optimizer, ema = setup(stage)
    step(model, optimizer, rank, 0)
    before = zero.traffic()
    ema.update()
    own = torch.tensor(zero.report(model, [optimizer, ema]).optimizer - zero.report(model, optimizer).optimizer)
    assert zero.traffic() == before
    full = sum(one.nbytes for one in averages(model, ema))
    assert 0.3 * full < own < 0.7 * full
    dist.all_reduce(own)
    assert full <= own < 1.1 * full


@pytest.mark.parametrize("how", ["bf16", "disk"])
@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_what_is_written_into_weights_after_the_step_is_averaged(rank, world, stage, how, tmp_path):
    model, optimizer, ema = setup(stage, how=how, folder=tmp_path)
    step(model, optimizer, rank, 0)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    ema.update()
    assert (averages(model, ema)[0] == 0.25).all()
    step(model, optimizer, rank, 1)


# ---------------------------------------------------------------------------------------------------- checkpoints


def saves(rank: int, world: int, stage: int, run: str) -> list[Any]:
    model, optimizer, ema = setup(stage)
    for number in range(3):
        step(model, optimizer, rank, number)
        ema.update()
    zero.checkpoint.save(run, model, [optimizer, ema])
    return goes_on(rank, world, model, optimizer, ema)


def loads(rank: int, world: int, stage: int, run: str) -> list[Any]:
    model, optimizer, ema = setup(stage)
    ema.param_groups[0]["decay"] = 0.1
    zero.checkpoint.load(run, model, [optimizer, ema])
    return goes_on(rank, world, model, optimizer, ema)


def goes_on(rank: int, world: int, model: Any, optimizer: Any, ema: zero.EMA) -> list[Any]:
    found = averages(model, ema)
    if world == 2:
        step(model, optimizer, rank, 3)
        ema.update()
    with ema.swapped():
        return [found, *([weights(model)] if world == 2 else [])]


@matrix.combined("stage, into", STAGES, STAGES, each=2)
def test_a_checkpoint_with_the_average_loads_at_another_stage_and_on_other_ranks(tmp_path, stage, into):
    saved = ranks.run(saves, 2, (stage, str(tmp_path)))[0]
    same(ranks.run(loads, 2, (into, str(tmp_path)))[0], saved)
    same(ranks.run(loads, 3, (into, str(tmp_path)))[0], saved[:1])


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_full_averages_load_at_another_stage_and_one_ranks_shard_on_that_rank(rank, world, stage):
    model, optimizer, ema = setup(stage)
    step(model, optimizer, rank, 0)
    ema.update()
    expected = averages(model, ema)
    full = zero.full_optimizer_state_dict(model, ema, to=0)
    pairs = [pair for pair in zero.full_tensors(model, ema, to=0) if pair[0].endswith("/average")]
    for given in (full, iter(pairs) if rank == 0 else None):
        other, _, of_other = setup((stage + 1) % 4)
        zero.load_full_optimizer_state_dict(other, of_other, given)
        same(averages(other, of_other), expected)
    own = copy.deepcopy(ema.state_dict())
    again, _, of_again = setup(stage)
    of_again.load_state_dict(own)
    same(averages(again, of_again), expected)
    if stage:
        own["param_groups"][0]["zero_shard"] = {"rank 7 of 8"}
        assert "the state is one rank's shard (rank 7 of 8)" in ranks.refusal(lambda: of_again.load_state_dict(own))
    adam = zero.full_optimizer_state_dict(model, optimizer, to=None)
    told = ranks.refusal(lambda: zero.load_full_optimizer_state_dict(again, of_again, adam))
    assert told.startswith("ValueError") and "of another optimizer than EMA" in told


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2)
def test_an_average_of_torchs_goes_on_as_the_pages_say(rank, world, stage):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer, average = SGD(net.parameters(), lr=0.1), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    model = nn.parallel.DistributedDataParallel(net)

    def trained(model: Any, optimizer: Any, update: Any, numbers: range) -> None:
        for number in numbers:
            step(model, optimizer, rank, number)
            update()

    trained(model, optimizer, partial(average.update_parameters, net), range(2))
    weights, averaged = copy.deepcopy(net.state_dict()), copy.deepcopy(average.state_dict())
    trained(model, optimizer, partial(average.update_parameters, net), range(2, 4))
    again, optimizer = zero.setup(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)), SGD, stage, lr=0.1)
    ema = zero.EMA(again, DECAY)
    assert "zero.load_full_state_dict(model, state), call update()" in ranks.refusal(
        lambda: ema.load_state_dict(averaged)
    )
    zero.load_full_state_dict(again, averaged if stage % 2 or not rank else None)
    ema.update()
    zero.load_full_state_dict(again, weights)
    trained(again, optimizer, ema.update, range(2, 4))
    with ema.swapped():
        same(dict(zero.full_state_dict(again, to=None)), dict(average.module.state_dict()))


@ranks.on(4)
def test_averages_of_an_oss_over_fewer_ranks_than_train(rank, world):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = nn.Linear(5, 3)
    optimizer = zero.OSS(net.parameters(), torch.optim.Adam, process_group=groups[rank // 2])
    ema = zero.EMA(model := nn.parallel.DistributedDataParallel(net), 0.5)
    ema.update()
    expected = [param.detach().clone() for param in net.parameters()]
    assert ema.state_dict()["state"] and zero.full_optimizer_state_dict(model, optimizer, to=None)
    full = zero.full_optimizer_state_dict(model, ema, to=None)["state"]
    same([full[number]["average"] for number in range(2)], expected)


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2, timeout=20)
def test_what_would_take_averages_for_weights_is_refused(rank, world, stage, tmp_path):
    model, optimizer, ema = setup(stage)
    step(model, optimizer, rank, 0)
    ema.update()
    before = averages(model, ema)
    with ema.swapped():
        for call in (
            ema.update,
            ema.swapped().__enter__,
            ema.state_dict,
            lambda: zero.full_optimizer_state_dict(model, ema, to=None),
            lambda: zero.checkpoint.save(tmp_path, model, [optimizer, ema]),
            lambda: zero.checkpoint.load(tmp_path, model, [optimizer, ema]),
        ):
            assert "within swapped() weights and averages are exchanged" in ranks.refusal(call), call
        zero.checkpoint.save(tmp_path / "best", model)
    for call in (ema.step, ema.zero_grad):
        assert ranks.refusal(call).endswith("Call its update() after each step.")
    same(averages(model, ema), before)
    step(model, optimizer, rank, 1)
    zero.unwrap(model)
    if stage > 1:
        assert "was wrapped or unwrapped since" in ranks.refusal(ema.update)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=20)
def test_an_average_that_is_built_before_its_model_is_wrapped_is_refused(rank, world, stage):
    made = net()
    ema = zero.EMA(made)
    wrapped = zero.setup(made, OPTIMS[0], stage)
    for call in (ema.update, ema.swapped().__enter__):
        assert "was wrapped or unwrapped since. Build another zero.EMA" in ranks.refusal(call), wrapped


@pytest.mark.parametrize("decay", [1, 1.5, -0.1, float("nan"), True, "0.9", None])
def test_a_decay_is_a_number_below_1(decay):
    with pytest.raises(ValueError, match=r"EMA\(decay=.*from 0 up to 1, but not 1"):
        zero.EMA(net(), decay)


def test_a_model_without_trained_parameters_has_no_average():
    with pytest.raises(ValueError, match="nothing in the Sequential is trained"):
        zero.EMA(net().requires_grad_(False))
    with pytest.raises(TypeError, match="where the model belongs"):
        zero.EMA(net().parameters())


@pytest.mark.parametrize("how", ["plain", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@ranks.on(2, timeout=20)
def test_what_one_rank_raises_in_an_evaluation_all_raise_and_the_weights_are_back(rank, world, stage, how):
    model, optimizer, ema = setup(stage, how=how)
    for number in range(2):
        step(model, optimizer, rank, number)
        ema.update()
    before = [weights(model), averages(model, ema)]

    def evaluation() -> None:
        with ema.swapped():
            evaluated(model, rank)
            if rank == 1:
                raise KeyError("no such metric")

    told = ranks.refusal(evaluation)
    assert told.startswith("KeyError") and "no such metric" in told, told
    same([weights(model), averages(model, ema)], before)
    step(model, optimizer, rank, 2)
    ema.update()


@pytest.mark.parametrize("stage", STAGES)
@ranks.on(1, bare=True)
def test_an_interrupted_evaluation_leaves_the_weights_and_masters_as_they_were(rank, world, stage):
    model, optimizer, ema = setup(stage, how="bf16")
    for number in range(2):
        step(model, optimizer, rank, number)
        ema.update()
    before = [weights(model), averages(model, ema), zero.full_optimizer_state_dict(model, optimizer, to=None)]
    with pytest.raises(KeyboardInterrupt), ema.swapped():
        raise KeyboardInterrupt
    after = [weights(model), averages(model, ema), zero.full_optimizer_state_dict(model, optimizer, to=None)]
    same(after, before)
    step(model, optimizer, rank, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2, timeout=20)
def test_ctrl_c_on_one_rank_does_not_wait_for_the_other_which_finds_out_with_the_next_call(rank, world, stage):
    model, optimizer, ema = setup(stage)
    step(model, optimizer, rank, 0)
    ema.update()
    if rank == 0:
        with pytest.raises(KeyboardInterrupt), ema.swapped():
            raise KeyboardInterrupt
        assert "out of step" in ranks.refusal(lambda: averages(model, ema))
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 is in zero\.EMA\.swapped\(\)"), ema.swapped():
            pass


@pytest.mark.parametrize("stage", [1, 2])
@ranks.raises(2, RuntimeError, "0.weight was moved, cast or given other data", timeout=20)
def test_what_is_wrong_with_the_weights_of_one_rank_is_raised_on_both(rank, world, stage):
    model, optimizer, ema = setup(stage)
    step(model, optimizer, rank, 0)
    ema.update()
    if rank == 1:
        model[0].weight.data = model[0].weight.data.clone()
    with ema.swapped():
        pass
