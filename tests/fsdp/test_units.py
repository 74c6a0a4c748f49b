"""Units chosen by hand, frozen parameters beside trained ones, mixtures of experts, and whole parameters: training
is that of torch."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import Adafactor, AdamW, Muon, Optimizer

import matrix
import ranks
import zero
from assertions import plain
from inner import unit_names, unsharded
from matrix import WHOLE
from odd import recomputed, reentrant
from optimizers import Lamb, Shampoo
from rows import Rows
from runs import SideBySide, on_mesh, sgd, side_by_side, stage_3, steps
from zoo import OPTIMIZERS, WIDTH, Adapted, Block, Stack, batch, data, loss_on, made


class Wrapping(Stack):
    """Wraps what it builds where the user has enabled it."""

    def __init__(self) -> None:
        super().__init__(lambda: wrap(Block()), classes=3, blocks=2)
        self.between = nn.Sequential(wrap(Block()), nn.Tanh(), Block())

    def middle(self, x: Tensor) -> Tensor:
        return self.between(super().middle(x))


def by_wrap() -> zero.FSDP:
    with enable_wrap(wrapper_cls=zero.FSDP):
        return wrap(Wrapping())


def by_hand() -> zero.FSDP:
    model = Wrapping()
    model.blocks[0] = zero.FSDP(model.blocks[0], reshard_after_forward=False)
    model.blocks[1] = zero.FSDP(model.blocks[1], auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model.between = zero.FSDP(nn.Sequential(zero.FSDP(model.between[0]), model.between[1], model.between[2]))
    return zero.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


BY_HAND = {
    by_wrap: {"", "blocks.0", "blocks.1", "between.0"},
    by_hand: {"", "blocks.0", "blocks.1", "blocks.1.up", "blocks.1.down", "between", "between.0"},
}


@pytest.mark.parametrize(("build", "optim"), [(by_wrap, AdamW), (by_hand, sgd)])
@ranks.on(2)
def test_units_chosen_by_hand_train_exactly_and_keep_the_models_own_names(rank, world, build, optim):
    def stage(model: nn.Module, optim: Any) -> Any:
        wrapped = build()
        return wrapped, optim(wrapped.parameters())

    both = SideBySide(Wrapping(), stage, optim)
    assert [name for name, _ in both.model.module.named_parameters()] == [n for n, _ in both.plain.named_parameters()]
    steps(both, rank, 2)
    both.step(loss_on(rank, 3), loss_on(rank, 4), unsent=1)
    assert not unsharded(both.model)
    assert {*unit_names(both.model)} == BY_HAND[build]


@ranks.on(2)
def test_the_default_units_do_not_depend_on_what_a_rank_has_of_units_inside(rank, world):
    """Layers of a quarter of the largest block become units; of blocks inside that are not cut one rank has nothing."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())  # of one parameter
    model = Stack(lambda: zero.FSDP(copy.deepcopy(block), partition="whole"), classes=2, blocks=2)
    assert unit_names(zero.FSDP(model, partition="whole", prefetch=1))


@ranks.raises(2, RuntimeError, r"unit 'blocks\.1\.up'", r"unit 'between'", "out of step", timeout=15)
def test_errors_call_units_by_their_names_in_the_whole_model(rank, world):
    model = by_hand()
    if rank:
        del model.module.blocks[1]
    model(batch(rank, 0)).sum().backward()


@ranks.raises(2, ValueError, "partition='rows'", timeout=15)
def test_an_inner_fsdp_goes_on_where_the_outer_one_was_refused(rank, world):
    inner = zero.FSDP(Block())
    model = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH))
    try:
        zero.FSDP(model, partition="rows")
    except ValueError:
        assert model[0] is inner
        inner(batch(rank, 0)).sum().backward()
        assert all(param.grad is None or param.grad.shape == param.shape for param in inner.parameters())
        raise


# Adapters, and freezing and unfreezing between steps.


def with_adapters() -> Stack:
    model = Stack(classes=5).requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(WIDTH, 2 * WIDTH)
    model.last.requires_grad_(True)
    return model


@ranks.on(2)
def test_unfrozen_parameters_are_added_to_the_optimizer(rank, world):
    """By add_param_group, with hyperparameters of their own."""

    def trained(params: Any) -> Any:
        return sgd([param for param in params if param.requires_grad])

    both = SideBySide(with_adapters(), stage_3, trained)
    for step in range(2):
        if step == 1:
            for inner, optimizer in zip(both.each(), (both.optimizer, both.plain_optimizer), strict=True):
                params = [*inner.blocks[1].down.requires_grad_(True).parameters()]
                optimizer.add_param_group({"params": params, "lr": 0.01, "weight_decay": 0.2})
        both.step(loss_on(rank, step))


def between(rank: int, world: int, thaw: bool) -> None:
    """Frozen or unfrozen after a backward under no_sync, before the one that sends what it left."""
    both = side_by_side(with_adapters(), {})
    both.step(loss_on(rank, 0))
    both.zero_grad()
    both.backward(loss_on(rank, 1), sync=False)
    for inner in both.each():
        (inner.blocks[1].down if thaw else inner.blocks[1].up).requires_grad_(thaw)
    both.backward(loss_on(rank, 2))
    both.update()
    both.step(loss_on(rank, 3))


def test_between_backwards_of_a_step_parameters_may_be_unfrozen_and_frozen_ones_are_not_stepped():
    ranks.run(between, args=(True,))
    words = [r"'blocks\.1\.up\.[\w.]+' has a gradient that was not reduced", "no_sync"]
    ranks.expect_error(between, 2, RuntimeError, *words, args=(False,), timeout=15)


@ranks.on(2)
def test_frozen_parameters_take_no_memory_for_gradients(rank, world):
    model = zero.FSDP(with_adapters())
    loss_on(rank, 0)(model).backward()
    trained = sum(plain(param).nbytes for param in model.parameters() if param.requires_grad)
    storages = {param.grad.untyped_storage() for param in model.parameters() if param.grad is not None}
    held = sum(one.nbytes() for one in storages)
    assert trained <= held <= trained + 4 * 4 * 16  # the usage counts, a unit


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["the root's", "a block's"])
@ranks.on(2)
def test_what_the_loss_alone_reads_after_forward_may_be_unfrozen(rank, world, options):
    """Of what stays unsharded until backward."""

    def reader(model: nn.Module) -> Any:
        return model.blocks[1] if options else model

    model = with_adapters()
    reader(model).gain = nn.Parameter(torch.linspace(0, 1, 5), requires_grad=False)
    both = side_by_side(model, options)

    def loss(model: nn.Module, step: int) -> Tensor:
        return loss_on(rank, step)(model) * reader(model).gain.exp().mean()

    for step in range(3):
        if step == 1:
            for inner in both.each():
                reader(inner).gain.requires_grad_(True)
        both.step(partial(loss, step=step))


# A mixture of experts of which each rank runs others, gathered as one unit: bit for bit.


NARROW, EXPERTS, TOKENS = 6, 5, 6


Expert = made(Block, lambda self, x: self.inner(x))


class Mixture(nn.Module):
    """Sends each token to the expert that it likes best of those that the batch allows. Idle experts are not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(NARROW, EXPERTS)
        self.experts = nn.ModuleList(Expert(NARROW, 5 + number % 2) for number in range(EXPERTS))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        weights, chosen = (self.router(x) + allowed.log()).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            (tokens,) = (chosen == number).nonzero(as_tuple=True)
            output = output.index_add(0, tokens, self.experts[number](x[tokens]) * weights[tokens, None])
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.mixture = nn.LayerNorm(NARROW), nn.Linear(NARROW, NARROW), Mixture()

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = x + torch.tanh(self.linear(x))
        return x + self.mixture(self.norm(x), allowed)


class Mixtures(Stack):
    def __init__(self, run: Callable[..., Tensor] = lambda layer, *args: layer(*args)) -> None:
        super().__init__(Layer, NARROW, blocks=2)
        self.run = run

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.blocks:
            x = self.run(layer, x, allowed)
        return x


def tokens_on(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and which experts they may go to: others on each rank and in each step, and the last one never."""
    allowed = torch.zeros(TOKENS, EXPERTS)
    for number in range(2):
        allowed[:, (2 * rank + step + number) % (EXPERTS - 1)] = 1.0
    return data(TOKENS, NARROW, rank=rank, step=step), allowed


def loss_of_experts(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: (model(*tokens_on(rank, step)) - 1).square().mean()


def trains(
    rank: int, options: dict[str, Any], optim: str = "sgd", *, model: Any = Mixtures, micro: int = 1, **how: Any
) -> SideBySide:
    """With all but the last of a step's micro-batches under no_sync."""
    both = side_by_side(model(), options, OPTIMIZERS[optim], **how)
    for step in range(2):
        both.step(*(loss_of_experts(rank, micro * step + number) for number in range(micro)), unsent=micro - 1)
    return both


UNITS: dict[str, dict[str, Any]] = {
    "by class": {"as_one_unit": [Mixture]},
    "whole layers": {"as_one_unit": [Layer]},
    "beside a policy": {"auto_wrap_policy": ModuleWrapPolicy({Layer, Expert, nn.Linear}), "as_one_unit": [Mixture]},
    "kept": {"as_one_unit": [Mixture], "reshard_after_forward": False},
    "in whole parts": {"as_one_unit": [Mixture], "partition": "whole"},
}


@pytest.mark.slow
@matrix.combined("units, optim", UNITS, OPTIMIZERS)
@ranks.on(2)
def test_each_rank_runs_other_experts_and_training_is_that_of_torch(rank, world, units, optim):
    names = unit_names(trains(rank, UNITS[units], optim).model)
    assert not any("experts" in name for name in names)
    assert units == "whole layers" or {"blocks.0.mixture", "blocks.1.mixture"} <= set(names)


@pytest.mark.slow
@ranks.on(4)
def test_four_ranks_of_two_replicas_agree_within_rounding(rank, world):
    trains(rank, on_mesh(world, {"as_one_unit": [Mixture], "replicas": 2}), tolerance=5e-6)


@pytest.mark.slow
@ranks.on(2)
def test_micro_batches_under_no_sync_and_evaluation_use_experts_of_their_own(rank, world):
    both = trains(rank, UNITS["kept"], micro=2)
    with torch.no_grad():
        assert torch.equal(*(model(*tokens_on(rank, 7)) for model in (both.model, both.plain)))


@pytest.mark.slow
@pytest.mark.parametrize(("units", "run"), [("by class", reentrant), ("whole layers", recomputed)])
@ranks.on(2)
def test_experts_under_activation_checkpointing(rank, world, units, run):
    trains(rank, UNITS[units], model=partial(Mixtures, run))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@ranks.raises(2, RuntimeError, r"unit 'blocks\.0\.mixture\.experts\.\d'", "rank 0", "rank 1", "as_one_unit", timeout=15)
def test_without_it_every_rank_raises_and_names_the_experts_and_the_remedy(rank, world, options):
    model = zero.FSDP(Mixtures(), auto_wrap_policy=ModuleWrapPolicy({Layer, Expert}), **options)
    for step in range(2):
        loss_of_experts(rank, step)(model).backward()


# partition="whole": optimizers that read whole parameters, and what each rank owns.


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 7).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x)))) @ self.transposed.t() @ self.transposed


of_odd_blocks = partial(Stack, Odd, classes=3)


class Both(Optimizer):
    """Muon for matrices, and AdamW for the rest, as one. It has the parameters of both, and steps by them."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        super().__init__(params, {})
        self.shards = [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3)]

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.shards:
            optimizer.step()


OWNED = {"partition": "whole", "auto_wrap_policy": ModuleWrapPolicy({Odd})}

row = Rows("optimizers that read whole parameters", __name__, net=of_odd_blocks, same={3})
row.of("Muon beside AdamW", optim=Both, fsdp=OWNED)
how = OWNED | {"reshard_after_forward": False}
row.of("Shampoo with kept units", optim=Shampoo, fsdp=how, tolerance=1e-5)  # products round by where gradients lie
row.of("LAMB for which setup chooses the cut", optim=Lamb)
row.of("Adafactor for which setup chooses the cut", optim=partial(Adafactor, lr=0.05))
test_rows = row.tests()


def owned(rank: int, world: int, frozen: bool) -> tuple[list[int], list[int]]:
    """Elements that this rank owns, and all, of every trained parameter."""
    model = of_odd_blocks(blocks=8)
    for block in model.blocks[: 4 * frozen]:
        block.up.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    whole = [param.numel() for param in trained]
    zero.FSDP(model, partition="whole")
    return [plain(param).numel() for param in trained], whole


@pytest.mark.parametrize(("world", "frozen"), [(2, False), (3, True)])
def test_each_parameter_is_with_one_rank_and_ranks_own_about_as_much_over_all_units(world, frozen):
    """Each unit has two large matrices: by itself it could not be cut for three ranks."""
    found = ranks.run(owned, world, args=(frozen,))
    whole = found[0][1]
    for size, *parts in zip(whole, *(own for own, _ in found), strict=True):
        assert sorted(parts) == [*[0] * (world - 1), size]
    assert max(sum(own) for own, _ in found) <= 1.1 * sum(whole) / world


# Pipeline parallelism by torch.distributed.pipelining over one dimension of a mesh, whose stages are sharded over
# the other.


MICRO_BATCHES = 4


class Syncs(PipelineStage):
    """Reduces gradients in the backward of the last micro-batch only."""

    def _unsynced(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else zero.no_sync(self.submod)

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        with self._unsynced(last=chunk == MICRO_BATCHES - 1):
            return super().forward_one_chunk(chunk, *args, **kwargs)

    def backward_maybe_with_nosync(self, kind: Any, arguments: Any, last_backward: bool = False) -> Any:
        with self._unsynced(last_backward):
            return super().backward_maybe_with_nosync(kind, arguments, last_backward)


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2)]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("stage", [3, *([2] if WHOLE else [])])
@ranks.on(4, fresh=True)
def test_a_pipeline_of_sharded_stages_trains_as_one_process_does(rank, world, stage):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, pp = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    share = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
    plain = nn.Sequential(*layers())
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, targets in batches():
        nn.functional.mse_loss(plain(inputs), targets).backward()
        sgd.step()
        sgd.zero_grad()
    sent = []
    for kind in (PipelineStage, Syncs):
        part, optimizer = zero.setup(layers()[place], torch.optim.SGD, stage=stage, device_mesh=mesh["dp"], lr=0.1)
        before = zero.traffic()
        own = kind(part, place, 2, torch.device("cpu"), group=pp)
        loss = lambda x, y: nn.functional.mse_loss(x, y) / MICRO_BATCHES  # noqa: E731
        schedule = Schedule1F1B(own, MICRO_BATCHES, loss_fn=loss, scale_grads=False)
        for inputs, targets in batches():
            schedule.step(*([inputs[share]] if place == 0 else []), target=targets[share] if place else None)
            optimizer.step()
            optimizer.zero_grad()
        sent.append((zero.traffic() - before).total)
        for name, value in zero.full_state_dict(part, to=None).items():
            torch.testing.assert_close(value, plain[place].state_dict()[name], rtol=0, atol=2e-6)
    assert sent[1] < 0.8 * sent[0]
