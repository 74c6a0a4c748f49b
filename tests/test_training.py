"""What a training loop may do at stages 2 and 3 alike: on two ranks the numbers are the reference's bit for bit."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import matrix
import ranks
import stacks
import zero
from sidebyside import STAGES, SideBySide, sgd
from stacks import WIDTH, Block, Scenarios, batch

SCENARIOS = scenario = Scenarios()


class Stack(stacks.Stack):
    """With a layer at the end. A forward may choose among the blocks."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(block)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, blocks: slice = slice(None)) -> Tensor:
        x = self.first(x)
        for block in self.blocks[blocks]:
            x = self.call(block, x)
        return self.last(x)


def loss_on(x: Tensor, **options: Any) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(x, **options).square().mean()


def steps(both: SideBySide, rank: int, count: int = 3, start: int = 0) -> None:
    for step in range(start, start + count):
        both.step(loss_on(batch(rank, step)))


# ------------------------------------------------------------------------------------------ forwards and backwards


@scenario
def several_forwards_before_one_backward(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(3):
        both.step(lambda model, step=step: sum(loss_on(batch(rank, 10 * step + i))(model) for i in range(3)))


@scenario
def several_backwards_before_a_step(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(3):
        both.step(*(loss_on(batch(rank, 10 * step + i)) for i in range(3)))


@scenario
def one_graph_gone_through_three_times(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(2):
        both.zero_grad()
        outputs = {model: model(batch(rank, step)) for model in (both.model, both.plain)}
        for i in range(3):
            both.backward(lambda model, i=i, of=outputs: of[model][:, i].square().mean(), retain_graph=i < 2)
        both.update()


@scenario
def a_block_used_twice_in_one_forward(rank, world, stage):
    class Twice(Stack):
        def call(self, block, x):
            return block(torch.tanh(block(x)))

    steps(SideBySide(Twice(), stage), rank)


@scenario
def a_block_that_calls_itself(rank, world, stage):
    class Recursive(Block):
        def forward(self, x, depth=2):
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    steps(SideBySide(Stack(block=Recursive), stage), rank)


@scenario
def blocks_run_backwards_and_left_out_from_step_to_step(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step, order in enumerate([slice(None), slice(None, None, -1), slice(1), slice(0, 0), slice(None)]):
        both.step(loss_on(batch(rank, step), blocks=order))


@scenario
def forward_without_gradient_in_between(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(3):
        for model in (both.model, both.plain):
            model.eval()
            with torch.no_grad():
                model(batch(rank, step))
            model.train()
        both.step(loss_on(batch(rank, step)))
        with torch.inference_mode():
            assert torch.equal(both.model(batch(rank, step)), both.plain(batch(rank, step)))


@scenario
def forward_that_no_backward_follows(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(3):
        both.model(batch(rank, 9))
        both.step(loss_on(batch(rank, step)))
        both.model(batch(rank, 9), blocks=slice(1))


@scenario
def forward_that_no_backward_follows_between_backward_and_step(rank, world, stage):
    """At stage 3 what it left whole must not be what is stepped."""
    both = SideBySide(Stack(), stage)
    for step in range(3):
        both.zero_grad()
        both.backward(loss_on(batch(rank, step)))
        both.model(batch(rank, 9))
        both.update()


@scenario
def gradients_cleared_in_every_form(rank, world, stage):
    """What is set to zero, not None, decays where it is not used: like the plain optimizer's."""
    both = SideBySide(Stack(), stage)
    for step in range(8):
        zero_grad = both.model.zero_grad if step % 2 else both.optimizer.zero_grad
        both.zero_grad(zero_grad, set_to_none=step % 4 < 2)
        both.backward(loss_on(batch(rank, step), blocks=slice(step % 3)))
        both.update()


@scenario
def gradients_for_inputs(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(2):
        inputs = {model: batch(rank, step).requires_grad_() for model in (both.model, both.plain)}
        both.step(lambda model: model(inputs[model]).square().mean())  # noqa: B023 - called at once
        found, expected = (x.grad for x in inputs.values())
        assert torch.equal(found, expected)


# -------------------------------------------------------------------------------------------------------- no_sync


@scenario
def backwards_under_no_sync_are_sent_along_later(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(3):
        both.step(*(loss_on(batch(rank, 10 * step + number)) for number in range(4)), unsent=2)


@scenario
def backwards_under_no_sync_are_sent_along_by_one_that_does_not_reach_them(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(2):
        losses = loss_on(batch(rank, 10 * step)), loss_on(batch(rank, 10 * step + 1), blocks=slice(1))
        both.step(*losses, unsent=1)


@scenario
def no_sync_between_backwards_that_are_reduced(rank, world, stage):
    both = SideBySide(Stack(), stage)
    for step in range(3):
        both.zero_grad()
        for number, sync in enumerate([True, False, True, False, False, True]):
            both.backward(loss_on(batch(rank, 10 * step + number)), sync=sync)
        both.update()


@scenario
def step_after_a_backward_under_no_sync_is_refused(rank, world, stage):
    both = SideBySide(Stack(), stage)
    both.backward(loss_on(batch(rank, 0)), sync=False)
    with pytest.raises(RuntimeError, match=r"(first|blocks\.\d|last)\S* has a gradient that was not reduced.*no_sync"):
        both.optimizer.step()
    both.backward(loss_on(batch(rank, 1)))
    both.update()
    steps(both, rank, start=2)


@scenario
def gradients_of_no_sync_cleared_by_zero_grad(rank, world, stage):
    both = SideBySide(Stack(), stage)
    both.backward(loss_on(batch(rank, 9)), sync=False)
    steps(both, rank)


@scenario
def exception_inside_no_sync(rank, world, stage):
    both = SideBySide(Stack(), stage)
    with pytest.raises(KeyError), both.model.no_sync():
        raise KeyError
    with pytest.raises(KeyError), both.model.no_sync(), both.model.no_sync():
        raise KeyError
    steps(both, rank)


# -------------------------------------------------------------------------------------------- parameters of all kinds


@scenario
def weights_tied_within_a_block(rank, world, stage):
    class Tied(Block):
        def inner(self, x):
            return linear(torch.tanh(self.up(x)), self.up.weight.t(), self.down.bias)

    model = Stack(block=Tied)
    for block in model.blocks:
        block.down.weight = nn.Parameter(block.up.weight.detach()[:WIDTH].clone())  # without use
        block.again = block.up
    steps(SideBySide(model, stage), rank)


@scenario
def weights_tied_across_blocks(rank, world, stage):
    model = Stack()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[1].down = model.blocks[0].down
    both = SideBySide(model, stage)
    steps(both, rank)
    assert both.model.module.blocks[2].up.weight is both.model.module.blocks[0].up.weight


@scenario
def unused_parameters_keep_no_gradient(rank, world, stage):
    """Weight decay and momentum leave them alone: the reference's have the gradient None."""
    model = Stack()
    model.blocks[1].spare = nn.Linear(3, 5)
    model.spare = nn.Parameter(torch.ones(7))
    steps(SideBySide(model, stage), rank)


@scenario
def parameters_used_by_some_ranks_get_the_average_with_zeros(rank, world, stage):
    class Some(Block):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = super().forward(x)
            return self.extra(x) if rank else x

    steps(SideBySide(Stack(block=Some), stage), rank)


@scenario
def several_dtypes_in_a_block(rank, world, stage):
    class Mixed(Block):
        def __init__(self):
            super().__init__()
            self.in_double = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.in_half = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

        def forward(self, x):
            return super().forward(x) + self.in_double(x.double()).float() + self.in_half(x.bfloat16()).float()

    steps(SideBySide(Stack(block=Mixed), stage), rank)


@scenario
def two_optimizers_for_one_model(rank, world, stage):
    def halves(model):
        params = list(model.parameters())
        return params[::2], params[1::2]

    class Two:
        """Both halves' optimizers as one."""

        def __init__(self, optimizers):
            self.optimizers = optimizers

        def step(self):
            for optimizer in self.optimizers:
                optimizer.step()

        def zero_grad(self, set_to_none=True):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none)

    adam = partial(torch.optim.Adam, lr=1e-3)

    def build(model, _):
        if stage.startswith("3"):
            wrapped, _ = STAGES[stage](model, sgd)
            first, second = halves(wrapped)
            return wrapped, Two([sgd(first), adam(second)])
        first, second = halves(model)
        optimizers = [zero.OSS(first, sgd), zero.OSS(second, adam)]
        return zero.ShardedDDP(model, optimizers), Two(optimizers)

    both = SideBySide(Stack(), build)
    first, second = halves(both.plain)
    both.plain_optimizer = Two([sgd(first), adam(second)])
    steps(both, rank)


@scenario
def frozen_beside_trained_in_every_block(rank, world, stage):
    class Adapted(Block):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.low, self.high = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

        def forward(self, x):
            return super().forward(x) + self.high(self.low(x))

    steps(SideBySide(Stack(block=Adapted), stage), rank)


@scenario
def whole_blocks_frozen(rank, world, stage):
    model = Stack()
    model.first.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    steps(SideBySide(model, stage), rank)


@scenario
def unfrozen_and_frozen_between_steps(rank, world, stage):
    model = Stack()
    model.first.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    both = SideBySide(model, stage)
    steps(both, rank)
    for inner in both.each():
        inner.requires_grad_(True)
    steps(both, rank, start=3)
    for inner in both.each():
        inner.blocks[0].requires_grad_(False)
        inner.last.weight.requires_grad_(False)
    steps(both, rank, start=6)


# -------------------------------------------------------------------------------------------------- inputs and outputs


@dataclasses.dataclass
class Pack:
    hidden: Tensor
    more: dict[str, Any]
    note: str = "kept"


Couple = namedtuple("Couple", "left right")


@scenario
def nested_inputs_and_outputs(rank, world, stage):
    class Nested(Block):
        def forward(self, pack, *, scale):
            left, (right, nothing) = pack.more["pair"]
            assert nothing is None and pack.note == "kept" and isinstance(pack.more, OrderedDict)
            hidden = super().forward(pack.hidden) * scale[0]
            return Pack(hidden, OrderedDict(pair=Couple(left + right, [right + 1, None]), steps=[1, "a"]))

    class Packing(Stack):
        def forward(self, inputs):
            hidden, left, right = (self.first(inputs["x"]).view(4, 1, WIDTH) + inputs["three"].view(1, 3, 1)).unbind(1)
            pack = Pack(hidden, OrderedDict(pair=Couple(left, [right, None])))
            for block in self.blocks:
                pack = block(pack, scale=(inputs["three"][0],))
            assert isinstance(pack.more["pair"], Couple) and pack.more["steps"] == [1, "a"]
            return {"deep": [(self.last(pack.hidden), pack)], "note": "text"}

    def loss(model, step):
        ((output, pack),) = model({"x": batch(rank, step), "three": torch.tensor([1.0, 0.5, 2.0])})["deep"]
        return output.square().mean() + pack.more["pair"].left.square().mean()

    both = SideBySide(Packing(block=Nested), stage)
    for step in range(3):
        both.step(partial(loss, step=step))


@scenario
def outputs_that_need_no_gradient_beside_those_that_do(rank, world, stage):
    class Counting(Block):
        def forward(self, x):
            return super().forward(x), x.detach().argmax(-1), torch.tensor(1)

    class Counted(Stack):
        def call(self, block, x):
            x, best, one = block(x)
            return x * one + (best == 1).float().mean()

    steps(SideBySide(Counted(block=Counting), stage), rank)


@scenario
def block_whose_output_is_not_used(rank, world, stage):
    class Ignoring(Stack):
        def forward(self, x):
            x = self.first(x)
            self.blocks[0](x)
            return self.last(self.blocks[2](self.blocks[1](x.detach())) + x)

    steps(SideBySide(Ignoring(), stage), rank)


@scenario
def block_that_changes_its_input_in_place(rank, world, stage):
    class InPlace(Block):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            return self.inner(self.relu(x))

    class Shifted(Stack):
        def call(self, block, x):
            return block(x + 0.1)

    steps(SideBySide(Shifted(block=InPlace), stage), rank)


@scenario
def block_that_hands_its_input_on(rank, world, stage):
    class Passing(Block):
        def forward(self, x):
            return x, self.inner(x)

    class Adding(Stack):
        def call(self, block, x):
            same, new = block(x)
            return same + new

    steps(SideBySide(Adding(block=Passing), stage), rank)


# --------------------------------------------------------------------------------------------- activation checkpointing


class CheckpointedAround(Stack):
    reentrant = False

    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=self.reentrant)


class CheckpointedAroundReentrant(CheckpointedAround):
    reentrant = True


class CheckpointedInside(Block):
    reentrant = False

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class CheckpointedInsideReentrant(CheckpointedInside):
    reentrant = True


def checkpointed(rank: int, stage: str, build: Callable[[], nn.Module], forwards: int = 1, **options: Any) -> None:
    both = SideBySide(build(), stage, **options)
    steps(both, rank)
    both.step(
        loss_on(batch(rank, 3)),
        lambda model: sum(loss_on(batch(rank, 4 + i))(model) for i in range(forwards)),
        unsent=1,
    )


@scenario
def blocks_checkpointed(rank, world, stage):
    checkpointed(rank, stage, CheckpointedAround, forwards=2)


@scenario
def blocks_checkpointed_reentrant(rank, world, stage):
    checkpointed(rank, stage, CheckpointedAroundReentrant)


@scenario
def checkpointed_inside_blocks(rank, world, stage):
    checkpointed(rank, stage, partial(Stack, block=CheckpointedInside), forwards=2)


@scenario
def checkpointed_inside_blocks_reentrant(rank, world, stage):
    checkpointed(rank, stage, partial(Stack, block=CheckpointedInsideReentrant))


def reentrant_twice(rank: int, world: int, stage: str) -> None:
    checkpointed(rank, stage, CheckpointedAroundReentrant, forwards=2, tolerance=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_two_gradients_for_a_parameter_in_one_backward_by_reentrant_checkpointing(stage):
    """Stage 3 sends both. Stage 2 has sent the first when the second comes, and says so, as DDP does."""
    if stage.startswith("3"):
        ranks.run(reentrant_twice, args=(stage,), timeout=20)
    else:
        ranks.expect_error(
            reentrant_twice, 2, RuntimeError, r"blocks\.\d", "use_reentrant=False", args=(stage,), timeout=20
        )


@scenario
def checkpointed_on_top_of_one_another(rank, world, stage):
    class Nested(CheckpointedAround):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    checkpointed(rank, stage, Nested, forwards=2)


# ------------------------------------------------------------------------------------------------------------ mishaps


class Faulty(nn.Module):
    """Hands its input on, until it is told to fail."""

    where: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise KeyError("as told")
        return FailsInBackward.apply(x) if self.where == "backward" else x


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("as told")


def fail(both: SideBySide, rank: int, where: str, block: int) -> None:
    faulty = both.model.module.blocks[block].between
    faulty.where = where
    with pytest.raises(KeyError):
        loss_on(batch(rank, 9))(both.model).backward()
    faulty.where = None


def mishap(rank: int, stage: str, where: str, block: int) -> None:
    both = SideBySide(Stack(block=lambda: Block(Faulty())), stage)
    steps(both, rank)
    for again in range(2):
        both.zero_grad()
        fail(both, rank, where, block)
        steps(both, rank, start=3 + 2 * again, count=2)


@scenario
def exception_in_the_middle_of_forward(rank, world, stage):
    mishap(rank, stage, "forward", 1)


@scenario
def exception_at_the_start_of_backward(rank, world, stage):
    mishap(rank, stage, "backward", 2)


@scenario
def exception_in_the_middle_of_backward(rank, world, stage):
    mishap(rank, stage, "backward", 1)


@scenario
def exception_in_backward_then_evaluation_first(rank, world, stage):
    both = SideBySide(Stack(block=lambda: Block(Faulty())), stage)
    fail(both, rank, "backward", 1)
    with torch.no_grad():
        assert torch.equal(both.model(batch(rank, 0)), both.plain(batch(rank, 0)))
    steps(both, rank)


@scenario
def exception_in_backward_then_weights_read_first(rank, world, stage):
    both = SideBySide(Stack(block=lambda: Block(Faulty())), stage)
    fail(both, rank, "backward", 1)
    both.compare()
    both.zero_grad()
    both.update()  # no gradient, no change
    steps(both, rank)


CASES = [
    (name, stage)
    for number, name in enumerate(SCENARIOS)
    for stage in ["2 in small buckets", "3", *(["3 kept"] if matrix.WHOLE or number % 3 == 0 else [])]
]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_numbers_are_those_of_the_reference(name, stage):
    ranks.run(SCENARIOS[name], args=(stage,), timeout=20)
