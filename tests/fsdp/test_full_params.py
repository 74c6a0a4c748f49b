"""FSDP: what lies where at rest and while a unit computes; full parameters and gradients outside of forward and
backward: summon_full_params, apply, state_dict. Modules inside an FSDP do not give this rank's shards away as if
they were unsharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim.swa_utils import AveragedModel

import gpus
import ranks
import zero
from assertions import close, plain, same, same_weights
from assertions import plain as as_plain
from inner import Meter, at_rest, unsharded
from runs import SideBySide, stage_3
from zero.fsdp.full_weights import loading, naming
from zero.fsdp.model import models_of
from zoo import CASES, GPT, WIDTH, Gained, Stack, batch


def side_by_side(rank: int, world: int, **options: Any) -> SideBySide:
    def loss(model: nn.Module, step: int) -> Tensor:
        return model(*case.batch(rank, step).inputs).square().mean()

    case = CASES["mlp"]
    both = SideBySide(case.model(), partial(stage_3, **options), tolerance=0.0 if world == 2 else 1e-5)
    both.step(partial(loss, step=0))
    both.zero_grad()
    both.backward(partial(loss, step=1))
    return both


@pytest.mark.parametrize(
    ("world", "options", "how"),
    [
        (2, {}, {}),
        (3, {"partition": "whole"}, {}),
        (2, {"offload": zero.CPUOffload()}, {}),
        (2, {}, {"rank0_only": True, "writeback": False}),
    ],
)
@ranks.on("world")
def test_gradients_are_whole_too_and_what_is_written_is_stepped(rank, world, options, how):
    """On rank 0 alone if it is asked for; then nothing is written."""
    both = side_by_side(rank, world, **options)
    inner, plain = both.each()
    shards = [as_plain(param).clone() for param in inner.parameters()]
    with both.model.summon_full_params(with_grads=True, **how):
        for param, expected, shard in zip(inner.parameters(), plain.parameters(), shards, strict=True):
            average = both.averages.get(expected)
            if how and rank:
                assert torch.equal(as_plain(param), shard)
                continue
            assert close(param, expected, both.tolerance)
            assert (param.grad is None) == (average is None)
            if average is not None:
                assert close(param.grad, average, both.tolerance)
                if not how:
                    param.grad.mul_(0.5)
                    both.averages[expected] = average * 0.5
    both.update()  # by the gradients that were halved


class Root(nn.Module):
    """A plain module around two FSDPs, of which the second has units inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.plain = nn.Linear(4, 6), nn.Linear(6, 8)
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))

    def wrapped(self) -> Root:
        self.first = zero.FSDP(self.first)
        self.last = zero.FSDP(self.last, auto_wrap_policy=CustomPolicy(lambda module: module is self.last[2]))
        return self


def shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(param.shape) for param in module.parameters()]


@gpus.cpu_only("the weights go to the CPU")
@ranks.on(2)
def test_called_on_the_class_it_takes_any_module(rank, world):
    plain, model = Root(), Root().wrapped()
    shards = shapes(model)
    given = {"recurse": True, "writeback": True, "rank0_only": False, "offload_to_cpu": True, "with_grads": False}
    with zero.FSDP.summon_full_params(module=model, **given), torch.no_grad():
        same_weights(model, plain)
        assert torch.equal(model.last(torch.ones(2, 8)), plain.last(torch.ones(2, 8)))
        for param in (*model.parameters(), *plain.parameters()):
            param.add_(1)
    assert shapes(model) == shards
    for module, alike in ((model.first, plain.first), (model.last[2], plain.last[2])):  # an FSDP, a unit inside of one
        with zero.FSDP.summon_full_params(module, writeback=False):
            same_weights(module, alike)
    with zero.FSDP.summon_full_params(model, recurse=False):  # which is no FSDP itself
        assert shapes(model) == shards
    with model.last.summon_full_params(recurse=False, writeback=False), torch.no_grad():
        assert shapes(model.last[0]) == shapes(plain.last[0]) and shapes(model.last[2]) == shards[-2:]
        assert torch.equal(model.last(torch.ones(2, 8)), plain.last(torch.ones(2, 8)))
    summon(nn.Linear(2, 2))


def summon(module: nn.Module, act: Callable[[nn.Module], object] = id, **options: Any) -> None:
    with zero.FSDP.summon_full_params(module, **options):
        act(module)


def started() -> Any:
    """Its root is unsharded now, but not for long."""
    model = zero.FSDP(Stack())
    model(batch(0, 0)).sum()
    return model


WRITEBACK, ON_CPU = {"rank0_only": True}, {"offload_to_cpu": True, "with_grads": True}
REFUSED: dict[str, tuple[type[Exception], Callable[[], object], list[str]]] = {
    "writeback from rank 0": (
        ValueError,
        lambda: summon(started(), **WRITEBACK),
        ["rank0_only=True", "writeback=False"],
    ),
    "gradients on the CPU": (
        ValueError,
        lambda: summon(Root().wrapped(), **ON_CPU),
        [f"{name}=True" for name in ON_CPU],
    ),
    "summon twice": (RuntimeError, lambda: summon(zero.FSDP(GPT()), summon), ["another", "between steps"]),
    "state_dict": (RuntimeError, lambda: started().module.state_dict(), ["Linear 'first'", "zero.full_state_dict"]),
    "a block's": (RuntimeError, lambda: started().blocks[1].state_dict(), ["Linear 'up'", "summon_full_params"]),
    "a copy": (TypeError, lambda: copy.deepcopy(started().module), ["cannot be copied", "before wrapping"]),
    "a copy within": (TypeError, lambda: summon(started(), lambda m: copy.deepcopy(m.blocks[0])), ["full_state_dict"]),
    "an average": (TypeError, lambda: AveragedModel(started().module), ["cannot be copied"]),
}


def refused(rank: int, world: int, name: str) -> None:
    REFUSED[name][1]()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_or_would_be_taken_for_whole_is_refused_on_every_rank(name):
    error, _, words = REFUSED[name]
    ranks.expect_error(refused, 2, error, *words, args=(name,), timeout=15)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)


@ranks.on(2)
def test_apply_sees_whole_parameters_and_leaves_what_it_did_on_rank_0(rank, world):
    torch.manual_seed(0)
    plain = GPT()
    model = zero.FSDP(copy.deepcopy(plain))
    torch.manual_seed(5 + rank)
    assert model.apply(initialise) is model
    torch.manual_seed(5)
    plain.apply(initialise)
    same(zero.full_state_dict(model, to=None), {**plain.state_dict()})
    assert not unsharded(model)


@ranks.on(2)
def test_a_state_dict_is_made_of_copies_each_by_itself_but_for_tied_ones(rank, world):
    case = CASES["gpt"]
    inner = case.model()
    model = zero.FSDP(inner, ignored_parameters=[inner.norm.weight])
    weights = model.state_dict()
    storages = {name: value.untyped_storage().data_ptr() for name, value in weights.items()}
    assert storages["head.weight"] == storages["tokens.weight"]
    assert len(set(storages.values())) == len(storages) - 1
    for value in weights.values():
        value.clone().zero_()
        with pytest.raises(RuntimeError, match="`zero_` writes into a copy"):
            value.zero_()
    assert all(bool(value.any()) for name, value in model.state_dict().items() if "bias" not in name)


@ranks.on(2)
def test_a_plain_module_around_it_loads_what_it_saves_and_what_is_plain(rank, world):
    model, plain = Root().wrapped(), Root()
    with torch.no_grad():
        for tensor in plain.parameters():
            tensor.add_(3)
    weights = plain.state_dict()
    assert str(model.load_state_dict(weights)) == "<All keys matched successfully>"
    found = model.state_dict()
    assert list(found) == list(weights)
    same({**found}, {**weights})

    first = weights.pop("first.weight")
    assert model.load_state_dict({**weights, "first.more": first}, strict=False) == (["first.weight"], ["first.more"])
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.module\.weight"):
        model.load_state_dict({**weights, "first.weight": first[1:]})
    with pytest.raises(RuntimeError, match="assign=False"):
        model.load_state_dict({**weights, "first.weight": first}, assign=True)


@ranks.on(2, timeout=20)
def test_rank_0_alone_takes_the_state_dict_of_what_it_alone_has_summoned(rank, world):
    model, plain = zero.FSDP(Root()), Root()
    zero.load_full_state_dict(model, plain.state_dict())
    with model.summon_full_params(rank0_only=True, writeback=False):
        if rank == 0:
            same({**model.state_dict()}, {**plain.state_dict()})
    assert len(model.state_dict()) == len(plain.state_dict())


@pytest.mark.parametrize(("world", "options"), [(2, {}), (2, {"sharding_strategy": "NO_SHARD"}), (1, {})])
@ranks.on("world", timeout=15)
def test_what_is_whole_is_given(rank, world, options):
    plain = Stack()
    model = zero.FSDP(copy.deepcopy(plain), **options)
    if options or world == 1:
        found = model.module.state_dict()
    else:
        with model.summon_full_params():
            found = {name: value.clone() for name, value in model.module.state_dict().items()}
        assert [*model.module.state_dict(keep_vars=True).values()] == [*model.parameters()]
    same(dict(found), dict(plain.state_dict()))


@ranks.on(2, timeout=15)
def test_full_weights_of_a_module_inside_are_gathered(rank, world):
    plain = Stack()
    model = zero.FSDP(copy.deepcopy(plain))
    model(batch(rank, 0)).sum()
    for inner, expected in ((model.module, plain), (model.blocks[1], plain.blocks[1])):
        found = zero.full_state_dict(inner, to=None)
        same(dict(found), dict(expected.state_dict()))
    assert unsharded(model) == []


def without_bias(module: nn.Module, found: dict[str, Any], prefix: str, _: object) -> None:
    assert found[f"{prefix}up.weight"].shape == (module.up.out_features, module.up.in_features)
    del found[f"{prefix}up.bias"]


@ranks.on(2, timeout=15)
def test_hooks_on_state_dicts_of_modules_inside_see_full_parameters(rank, world):
    plain, seen = Stack(), dict[str, Any]()
    model = zero.FSDP(copy.deepcopy(plain))
    model.register_state_dict_post_hook(lambda module, found, *_: seen.update(found))
    model.blocks[1].register_state_dict_post_hook(without_bias)
    expected = dict(plain.state_dict())
    del expected["blocks.1.up.bias"]
    for found in (model.state_dict(), zero.full_state_dict(model, to=None)):
        same(dict(found), expected)
        same(seen, expected)


@ranks.on(2)
def test_names_and_shapes_are_given_and_no_values(rank, world):
    plain = Stack()
    model = zero.FSDP(copy.deepcopy(plain))
    for context in (naming, loading):
        with context([one for one, _ in models_of(model)]):
            for inner, expected in ((model.module, plain), (model.blocks[1], plain.blocks[1])):
                found = inner.state_dict()
                assert {name: one.shape for name, one in found.items()} == {
                    name: one.shape for name, one in expected.state_dict().items()
                }
            with pytest.raises(NotImplementedError, match="meta"):
                found["up.weight"].cpu()
    assert ranks.refusal(model.module.state_dict).startswith("RuntimeError")


@ranks.on(2)
def test_frozen_modules_that_load_by_themselves_stay_sharded_while_others_are_loaded(rank, world):
    plain = Stack()
    plain.first.requires_grad_(False).register_load_state_dict_pre_hook(lambda *_: None)
    model = zero.FSDP(plain)
    inner = [one for one, _ in models_of(model)]
    for frozen in (False, True):
        with loading(inner, frozen=frozen):
            assert [unit.summoned for one in inner for unit in one.units].count(True) == frozen


@ranks.on(2)
def test_full_weights_load_into_a_module_inside(rank, world):
    model = zero.FSDP(Stack())
    for step, context in enumerate((nullcontext, model.summon_full_params)):
        full = {name: value + 1 + step for name, value in zero.full_state_dict(model, to=None).items()}
        with context():
            model.module.load_state_dict(full)
        same({**zero.full_state_dict(model, to=None)}, full)
    full = {name: value + 1 for name, value in full.items() if name.startswith("blocks.1.")}
    model.module.blocks[1].load_state_dict({name.removeprefix("blocks.1."): value for name, value in full.items()})
    same({name: value for name, value in zero.full_state_dict(model, to=None).items() if name in full}, full)


# What lies where. That it trains right in all kinds of loops is tested in tests/parity.


class Shifted(Stack):
    def __init__(self) -> None:
        super().__init__(Gained, blocks=4)
        self.register_buffer("shift", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def total(value: float) -> float:
    tensor = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def assert_in_parts(model: zero.FSDP, whole: nn.Module) -> None:
    """Of every parameter each rank holds a shard of as many dimensions, and nothing more of it exists."""
    for (name, param), (whole_name, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == whole_name
        assert param.shape == expected.shape
        own = plain(param)
        assert own.dim() == expected.dim() or (not expected.dim() and not own.numel())  # nothing has a dimension
        assert total(own.numel()) == expected.numel()
        assert param.grad is None or plain(param.grad).shape == own.shape
    assert not unsharded(model)
    held = {param.untyped_storage() for param in model.parameters()}
    padding = 64 * (1 + dist.get_world_size()) * sum(1 for _ in model.parameters())
    assert total(sum(one.nbytes() for one in held)) <= sum(param.nbytes for param in whole.parameters()) + padding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options"), [(3, {}), (2, {"partition": "whole"}), (2, {"reshard_after_forward": False})]
)
@ranks.on("world")
def test_at_rest_parameters_and_gradients_are_parts(rank, world, options):
    whole, model = Shifted(), zero.FSDP(Shifted(), **options)
    assert_in_parts(model, whole)
    model(batch(rank, 0)).square().mean().backward()
    assert_in_parts(model, whole)
    whole(batch(rank, 0)).square().mean().backward()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        total_of_all = expected.grad.flatten()  # NCCL sends no tensor that is not contiguous
        dist.all_reduce(total_of_all)
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, None if param.grad is None else plain(param.grad).flatten())
        shards = torch.cat([shard for shard in gathered if shard is not None])
        torch.testing.assert_close(shards, total_of_all / world, rtol=2e-6, atol=1e-8)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@ranks.on(2)
def test_a_forward_that_needs_no_backward_leaves_parts(rank, world):
    model = zero.FSDP(Shifted(), reshard_after_forward=False)
    for within in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        model.requires_grad_(within is not torch.enable_grad).train(within is torch.no_grad)
        with within():
            model(batch(rank, 0))
        assert_in_parts(model, Shifted())


def random(seed: int, net: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    for tensor in [*net.parameters(), *net.buffers()]:
        tensor.data.normal_()
    return net


@ranks.on(2)
def test_ranks_start_from_the_weights_of_rank_0(rank, world):
    same(zero.FSDP(random(rank, Shifted())).state_dict(), {**random(0, Shifted()).state_dict()})


@ranks.on(2)
def test_summon_full_params_with_and_without_writeback(rank, world):
    model, plain = zero.FSDP(Shifted()), Shifted()

    def written(factor: float, **how: Any) -> None:
        with model.summon_full_params(**how), torch.no_grad():
            same_weights(model.module, plain)
            for param in model.parameters():
                param.mul_(factor)

    def unchanged() -> None:
        assert_in_parts(model, plain)
        same({**model.state_dict()}, {**plain.state_dict()})

    written(2.0)
    for param in plain.parameters():
        param.data.mul_(2)
    unchanged()
    written(3.0, writeback=False)
    unchanged()
    with pytest.raises(KeyError), model.summon_full_params():
        raise KeyError
    unchanged()
    assert torch.equal(model(batch(rank, 0)), plain(batch(rank, 0)))
    written(1.0)  # after a forward whose backward never came
    unchanged()


@ranks.raises(2, RuntimeError, "create_graph=True", "stage 2", timeout=20)
def test_gradients_of_gradients_are_refused_with_the_remedy(rank, world):
    model = zero.FSDP(Shifted())
    inputs = batch(rank, 0).requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)


@ranks.on(2)
def test_gradients_that_no_sync_has_left_are_freed_where_they_are_cleared(rank, world):
    with Meter() as meter:
        model = zero.FSDP(Shifted())
        model(batch(rank, 0)).sum().backward()
        model.zero_grad()
        before = at_rest(meter)
        with model.no_sync():
            model(batch(rank, 1)).sum().backward()
        assert at_rest(meter) == before + sum(param.grad.nbytes for param in model.parameters())
        model.zero_grad()
        assert at_rest(meter) == before


class Branches(Stack):
    """Its second block counts in the loss only where it is asked to. kept: whether a backward may come through it."""

    seen: Tensor | None = None

    def forward(self, x: Tensor, both: bool, kept: bool) -> Tensor:
        x = self.first(x)
        one = self.blocks[0](x)
        with torch.set_grad_enabled(kept):
            self.seen = self.blocks[1](x)
        return one + self.seen if both else one


@ranks.on(2)
def test_what_no_sync_left_on_one_rank_is_averaged_by_a_backward_that_passes_the_unit_by(rank, world):
    """All ranks reduce the unit then, although one has no gradient of it."""
    both = SideBySide(Branches(blocks=2), "3 kept")
    for step in range(3):
        x = batch(rank, step)
        both.step(
            lambda model: model(x, rank == 0, True).square().mean(),  # noqa: B023
            lambda model: model(x, False, False).square().mean(),  # noqa: B023
            unsent=1,
        )


@ranks.on(2)
def test_gradients_that_are_assigned_to_full_parameters_count(rank, world):
    model = zero.FSDP(Stack())
    for grads in (False, True):
        with model.summon_full_params(with_grads=True):
            for param in model.parameters():
                assert (param.grad is not None) is grads
                param.grad = torch.full_like(param, 1.0 + grads)
        for param in model.parameters():
            assert float(param.grad.sum()) == (1.0 + grads) * param.numel()


@ranks.raises(2, RuntimeError, "within summon_full_params", r"backward\(\) outside")
def test_a_backward_of_an_earlier_forward_is_refused_where_parameters_are_full(rank, world):
    model = zero.FSDP(Stack())
    loss = model(batch(rank, 0)).sum()
    with model.summon_full_params():
        loss.backward()


class Keeping(nn.Module):
    """Blocks put what a loss adds up into a list that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        for block in self.blocks:
            block.forward = partial(self.run, block)

    @staticmethod
    def run(block: nn.Module, x: Tensor, kept: list[Tensor]) -> Tensor:
        x = block[0](x)
        kept.append(x.square().mean())
        return x

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return torch.stack(kept)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_units_in_16_bits_write_into_the_list_that_they_are_given(rank, world, stage):
    model, _ = zero.setup(Keeping(), torch.optim.SGD, stage=stage, lr=0.1, precision="bf16")
    assert len(model(batch(rank, 0))) == 3


@ranks.on(2)
def test_a_gradient_within_a_forward_leaves_what_no_sync_has_left(rank, world):
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.blocks[0](place).square().sum(), place)
            return self.blocks[1](self.first(x) + force).square().sum()

    found = []
    for stage in (2, 3):
        torch.manual_seed(0)
        model, optimizer = zero.setup(Forces(), torch.optim.SGD, stage=stage, lr=0.01)
        with zero.no_sync(model):
            model(batch(rank, 0)).backward()
        model(batch(rank, 1)).backward()
        optimizer.step()
        found.append(zero.full_state_dict(model, to=None))
    same(*found, "the weights")
