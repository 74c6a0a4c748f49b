"""Optimizers that a script has built before, given to zero.setup or OSS.from_optimizer: they train on as they would
by themselves."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR

import gpus
import matrix
import ranks
import zero
from assertions import close, plain, same
from llama import WORDS, Llama, matrices
from runs import average_gradients
from transports import TRANSPORTS, by
from zero.fsdp.fsdp import running_model
from zero.shards.partition import Shares, arrange, cost
from zoo import data


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def in_groups(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """named: as the Trainer of transformers makes them."""
    made: list[dict[str, Any]] = [{"weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0}]
    for group, wide in zip(made, (True, False), strict=True):
        pairs = [(name, param) for name, param in model.named_parameters() if (param.dim() > 1) == wide]
        group["params"] = [param for _, param in pairs]
        group |= {"param_names": [name for name, _ in pairs]} if named else {}
    return made


class Handing(SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: Adam(in_groups(model), lr=0.01, betas=(0.8, 0.9)),
    "sgd": lambda model: SGD(in_groups(model), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: Adagrad(in_groups(model), lr=0.1),  # has state as soon as it is built
    "adam, named": lambda model: Adam(in_groups(model, named=True), lr=0.01, amsgrad=True),
    "a class of a user's": lambda model: Handing(in_groups(model), lr=0.1, momentum=0.5),
}


class Trained:
    """A model, its optimizer with what a script has around it, and what hooks have seen."""

    def __init__(self, build: Callable[[nn.Module], Optimizer]) -> None:
        self.model, self.seen = net(), list[str]()
        self.optimizer = build(self.model)
        self.groups = self.optimizer.param_groups
        self.scheduler = SequentialLR(
            self.optimizer, [ConstantLR(self.optimizer, 0.5, 1), ExponentialLR(self.optimizer, 0.5)], [2]
        )
        register = self.optimizer.register_step_pre_hook, self.optimizer.register_step_post_hook
        self.handles = [on(partial(self.note, when)) for on, when in zip(register, ("before", "after"), strict=True)]
        self.optimizer.register_state_dict_post_hook(lambda _, found: found.update(note="mine"))

    def note(self, when: str, optimizer: Optimizer, *_: Any) -> None:
        gradients = [param.grad for group in optimizer.param_groups for param in group["params"]]
        self.seen.append(f"{when} a step of {len(optimizer.param_groups)} groups")
        assert when == "after" or any(gradient is not None for gradient in gradients)

    def steps(self, rank: int, numbers: range, *, average: bool = False) -> list[float]:
        losses = []
        for number in numbers:
            self.optimizer.zero_grad()
            loss = self.model(data(4, 6, rank=rank, step=number)).square().mean()
            loss.backward()
            if average:
                average_gradients(self.model)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@matrix.combined("stage, transport, name", range(4), TRANSPORTS, OPTIMIZERS, each=2)
@ranks.on(2)
def test_a_built_optimizer_goes_on_at_every_stage(rank, world, stage, transport, name):
    """With its class, groups, options, hooks and state, and the schedule that was made for it before."""
    expected, found = Trained(OPTIMIZERS[name]), Trained(OPTIMIZERS[name])
    given = found.optimizer
    for one in (expected, found):
        one.steps(rank, range(2), average=True)
    with by(transport):
        found.model, found.optimizer = zero.setup(found.model, given, stage=stage)
        kept = found.optimizer.optim if stage in (1, 2) else found.optimizer
        assert type(kept) is type(given) and (kept is given) == (stage in (0, 3))
        before = zero.full_optimizer_state_dict(found.model, found.optimizer, to=None)
        same(before, expected.optimizer.state_dict(), "the state")
        for numbers in (range(2, 4), range(4, 5)):
            assert found.steps(rank, numbers) == expected.steps(rank, numbers, average=True)
            found.handles.pop().remove()
            expected.handles.pop().remove()
        same(zero.full_state_dict(found.model, to=None), dict(expected.model.state_dict()), "the weights")
        state = zero.full_optimizer_state_dict(found.model, found.optimizer, to=None)
    same(state, expected.optimizer.state_dict(), "the state")
    assert state["note"] == "mine" and found.seen == expected.seen and len(found.seen) == 9
    assert found.groups is found.optimizer.param_groups is given.param_groups


@pytest.mark.parametrize("stage", [1, 2])
@ranks.on(2)
def test_an_optimizer_that_was_given_to_setup_neither_steps_nor_saves(rank, world, stage):
    model = net()
    given = SGD(model.parameters(), lr=0.1)
    wrapped, optimizer = zero.setup(model, given, stage=stage)
    uses = [given.step, given.state_dict, lambda: given.load_state_dict({})]
    uses += [lambda: zero.checkpoint.save("nowhere", wrapped, given), lambda: zero.full_tensors(wrapped, given)]
    for use in uses:
        told = ranks.refusal(use)
        assert "this SGD was given to" in told and "the OSS that it returned" in told
    optimizer.state_dict()


@ranks.on(2)
def test_state_that_was_cut_is_marked_before_the_first_step(rank, world):
    trained = Trained(OPTIMIZERS["adam"])
    trained.steps(rank, range(1), average=True)
    _, optimizer = zero.setup(trained.model, trained.optimizer, stage=3)
    saved: list[Any] = [None, None]
    with pytest.warns(UserWarning, match="only one rank's shard"):
        dist.all_gather_object(saved, optimizer.state_dict())
    optimizer.load_state_dict(saved[rank])
    assert "one rank's shard" in ranks.refusal(lambda: optimizer.load_state_dict(saved[1 - rank]))


class Forgetful(SGD):
    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(params, lr=lr * scale)


@ranks.on(2)
def test_an_optimizer_that_keeps_no_arguments_goes_on_as_it_was_made(rank, world):
    model = net()
    given = Forgetful(model.parameters(), scale=2.0)
    optimizer = zero.OSS.from_optimizer(given)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(given.param_groups) == 2
    model(data(4, 6, rank=0)).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[0].bias, net()[0].bias - 0.2 * model[0].bias.grad)


def with_state(net: nn.Module, *shape: int) -> Optimizer:
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    if shape:
        optimizer.state[net[0].weight]["momentum_buffer"] = torch.ones(shape)
    return optimizer


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "no optimizer": (lambda rank, net: net if rank else with_state(net), ["given a Sequential", r"\(on rank 1\)"]),
    "an OSS": (lambda rank, net: zero.OSS(net.parameters(), SGD, lr=0.1), ["given an OSS"]),
    "state on one rank": (lambda rank, net: with_state(net, *(10, 6)[: 2 * rank]), ["of 0 param", "of 1 param"]),
    "another model's state": (lambda rank, net: with_state(net, 7, 5), ["momentum_buffer", r"\[7, 5\]"]),
}


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, (_, words) in REFUSED.items()])
@ranks.raises(2, ValueError, timeout=10)
def test_what_cannot_be_taken_over_is_refused_on_every_rank(rank, world, name, words):
    zero.OSS.from_optimizer(REFUSED[name][0](rank, net()))


# Several optimizers over one model: Muon for matrices, AdamW beside it. The numbers are DDP's, and ranks have equal
# steps and equal memory.


def optimizers(model: nn.Module) -> list[Optimizer]:
    whole = matrices(model)
    rest = [param for name, param in model.named_parameters() if name not in whole]
    return [AdamW(rest, lr=1e-2, weight_decay=0.1), Muon([*whole.values()], lr=0.02, weight_decay=0.1)]


def run(rank: int, transport: str, stage: int, clip: float | None, **options: Any) -> tuple[list[Tensor], Any, Any]:
    """Losses, weights, and the full state of both optimizers, after steps of two batches each."""
    with by(transport):
        torch.manual_seed(0)
        model = Llama()
        model, both = zero.setup(model, optimizers(model), stage=stage, **(options if stage else {}))
        losses = []
        for step in range(4):
            for half in range(2):
                tokens = torch.randint(WORDS, (2, 9), generator=gpus.generator(rank + 2 * half + 4 * step))
                with nullcontext() if half else zero.no_sync(model):
                    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                    loss.backward()
                losses.append(loss.detach())
            if clip is not None:
                losses.append(clip_grad_norm_(model.parameters(), clip))
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        weights = zero.full_state_dict(model, to=None)
        return losses, weights, [zero.full_optimizer_state_dict(model, one, to=None)["state"] for one in both]


def beside_ddp(rank: int, world: int, transport: str, stage: int, clip: float | None, options: dict[str, Any]) -> None:
    expected = run(rank, transport, 0, clip)
    found = run(rank, transport, stage, clip, **options)
    if clip is None:
        same(found, expected)
        return
    # The norm is summed in another order, and Muon computes in bfloat16 with what it scales.
    for got, wanted in zip(found[0], expected[0], strict=True):
        assert close(got, wanted, 1e-4)
    assert close(found[0][2], expected[0][2], 1e-6), "the norm of the first step"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_muon_beside_adamw_has_the_numbers_of_ddp(transport, stage, clip):
    ranks.run(beside_ddp, 2, args=(transport, stage, clip, {}))


def norms_alone_are_cut(name: str, param: nn.Parameter) -> Any:
    return "even" if "norm" in name else "whole"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_function_chooses_for_each_parameter(stage):
    """Also what AdamW steps may stay whole."""
    ranks.run(beside_ddp, 2, args=("gloo", stage, None, {"partition": norms_alone_are_cut}))


class Together(Optimizer):
    """Muon and AdamW in one class, by an option of the group, as public ones do."""

    def __init__(self, params: Any, lr: float = 1e-2, matrices: bool = False) -> None:
        super().__init__(params, {"lr": lr, "matrices": matrices})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and group["matrices"]:
                    left, _, right = torch.linalg.svd(param.grad, full_matrices=False)
                    param.sub_(left @ right, alpha=group["lr"])
                elif param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=group["lr"])


def matrices_alone_stay_whole(name: str, param: nn.Parameter) -> Any:
    return "whole" if "blocks" in name and param.dim() == 2 else "even"


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks.on(2)
def test_one_class_may_need_some_groups_whole_and_not_others(rank, world, stage):
    found = []
    for at in (0, stage):
        torch.manual_seed(0)
        model = Llama(blocks=2)
        whole = matrices(model)
        rest = {name: param for name, param in model.named_parameters() if name not in whole}
        groups = [{"params": [*whole.items()], "matrices": True}, {"params": [*rest.items()]}]
        embedding, numel = rest["embedding.weight"], rest["embedding.weight"].numel()
        cut = {"partition": matrices_alone_stay_whole} if at else {}
        wrapped, optimizer = zero.setup(model, Together, stage=at, params=groups, **cut)
        if at:
            part = plain(embedding if at == 3 else optimizer.part(embedding))
            assert 0 < part.numel() < numel
        for step in range(3):
            wrapped(torch.randint(WORDS, (2, 8), generator=gpus.generator(rank + step))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(zero.full_state_dict(wrapped, to=None))
    same(found[1], found[0])


def cuts_a_matrix(rank: int, world: int, stage: int) -> None:
    model = Llama(blocks=2)
    groups = [{"params": [*model.named_parameters()], "matrices": True}]
    model, optimizer = zero.setup(model, Together, stage=stage, params=groups, partition=norms_alone_are_cut)
    model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_function_that_cuts_what_the_optimizer_needs_whole_is_refused(stage):
    error = RuntimeError if stage == 3 else ValueError
    ranks.expect_error(cuts_a_matrix, 2, error, "needs each parameter whole", args=(stage,))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda model: [], "a list of optimizers with nothing in it"),
        (lambda model: [Muon, AdamW(model.parameters())], "a list of optimizers with Muon in it"),
        (lambda model: [AdamW([model.embedding.weight]), SGD(model.blocks.parameters())], "1 trained parameters"),
        (
            lambda model: [AdamW(model.parameters()), SGD(model.norm.parameters())],
            "'norm.weight' is a parameter of sev",
        ),
    ],
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_lists_that_cannot_train_the_model_are_refused(stage, given, text):
    model = Llama()
    with pytest.raises(ValueError, match=text):
        zero.setup(model, given(model), stage=stage)


def test_what_a_function_may_return():
    with pytest.raises(ValueError, match=r"partition\('embedding.weight', parameter\) returned 'half'"):
        zero.FSDP(Llama(), partition=lambda name, param: "half")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_have_equal_steps_and_equal_memory(world):
    """Of a Llama with an embedding of 32,000 words: what a rank steps whole, and what it holds of all units."""
    with torch.device("meta"):
        model = Llama(1024, blocks=12, words=32_000)
    whole = {*matrices(model).values()}
    division = Shares(world).divide([*model.parameters()], whole)
    units = [[*block.parameters()] for block in model.blocks]
    units.append([model.embedding.weight, model.norm.weight])
    held, costs = np.zeros(world), np.zeros(world)
    for unit in units:
        for order, layout in arrange(unit, world, division):
            for rank in range(world):
                for span in layout.spans(rank):
                    param = unit[order[span.index]]
                    held[rank] += span.numel
                    costs[rank] += cost(param) if param in whole else 0
                    assert param not in whole or span.numel == param.numel()
    assert sum(held) == sum(param.numel() for param in model.parameters())
    assert max(held) <= 1.05 * np.mean(held)
    assert max(costs) <= 1.05 * np.mean(costs)


def owned(rank: int, world: int, stage: int) -> list[int]:
    model = Llama(width=64, blocks=4, words=2000)
    model, both = zero.setup(model, optimizers(model), stage=stage)
    if stage == 3:
        return [group.shard.numel() for group in running_model(model).index.groups]
    return [group.shard.numel() for one in both for group in one.shards.shard_groups]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_hold_equal_shards_where_one_optimizer_needs_matrices_whole(stage):
    found = [sum(one) for one in ranks.run(owned, 3, args=(stage,))]
    assert max(found) <= 1.02 * sum(found) / 3
