"""overlap_param_gather of ShardedDDP: parameters arrive while the next forward runs, and nobody reads old ones.

Gloo is taken here for a backend that sends beside the computing, as NCCL does: transfers go the same way then.
"""

import contextlib
import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import gpus
import ranks
import zero
from sidebyside import data
from transports import overlapping
from zero.plan.meter import Meter

WIDTH = 24
OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": partial(AdamW, lr=1e-2, weight_decay=0.1),
}


class Net(nn.Module):
    """Weights are read by their own modules, by others (attention reads its projection's), as functions, and tied."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x, readable=True):
        x = self.frozen(self.first(x))
        if not readable:
            raise KeyError("a batch that could not be read")
        x = x + self.attention(x, x, x)[0]
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.linear(x * self.scale, self.last.weight.t(), bias=self.last.bias)


def sharded(net, name, **options):
    """In buckets of a layer or less."""
    optimizer = zero.OSS(net.parameters(), OPTIMIZERS[name], **options)
    return zero.ShardedDDP(net, optimizer, reduce_buffer_size=700, overlap_param_gather=True), optimizer


def plain(name):
    model = DistributedDataParallel(Net())
    return model, OPTIMIZERS[name](model.parameters())


def batch(rank, step):
    return data(2, 3, WIDTH, rank=rank, step=step)


def loss_of(model, rank, step):
    return model(batch(rank, step)).square().mean()


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def trained_by_ddp(rank, steps=(0, 1)):
    model, optimizer = plain("sgd")
    train(model, optimizer, rank, steps)
    return model.module


def trained(rank, steps=(0, 1), **options):
    """The module, its wrapper and its optimizer, with all but the frozen parameters on their way."""
    net = Net()
    model, optimizer = sharded(net, "sgd", **options)
    train(model, optimizer, rank, steps)
    assert in_flight(optimizer) == sum(flat.params[0].requires_grad for flat in optimizer.shard_groups) > 3
    return net, model, optimizer


def assert_same(found, expected):
    assert list(found) == list(expected)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"other values of {different}"


def beside(test):
    """Runs a test on two ranks, whose transfers go beside the computing."""
    return ranks.on(2, timeout=30)(overlapping("beside")(test))


def in_flight(optimizer):
    return sum(flat.gathering for flat in optimizer.shard_groups)


# ------------------------------------------------------------------------------------------------ the same training


def accumulating(model, optimizer, rank, step):
    with model.no_sync():
        loss_of(model, rank, 100 + step).backward()
    train(model, optimizer, rank, [step])


def evaluated(model, optimizer, rank, step):
    """Forwards without gradients, and without backward, come between."""
    train(model, optimizer, rank, [step])
    model.eval()
    with torch.set_grad_enabled(step % 2 == 1):
        total = model(batch(rank, 50 + step)).sum().item()
    model.train()
    return total


def interrupted(model, optimizer, rank, step):
    """Between step and forward, and in forward."""
    for readable in (True, False):
        with contextlib.suppress(KeyError):
            if readable:
                raise KeyError
            model(batch(rank, step), readable=False)
    train(model, optimizer, rank, [step])


LOOPS = [(name, loop, {}) for name in OPTIMIZERS for loop in (accumulating, evaluated, interrupted)]
LOOPS.append(("sgd", evaluated, {"partition": "whole"}))


@pytest.mark.parametrize(("name", "loop", "options"), LOOPS, ids=lambda of: getattr(of, "__name__", str(of)))
@beside
def test_training_is_bit_for_bit_that_of_ddp(rank, world, name, loop, options):
    totals, finals = [], []
    for model, optimizer in (plain(name), sharded(Net(), name, **options)):
        for step in range(4):
            totals.append(loop(model, optimizer, rank, step))
        finals.append(model.module.state_dict())
    assert totals[:4] == totals[4:]
    assert_same(*finals)


@beside
def test_two_optimizers_each_leave_their_own_in_flight(rank, world):
    """One of two optimizers steps every other time."""
    finals = []
    for ours in (False, True):
        net = Net()
        shares = [[*net.first.parameters(), *net.blocks.parameters()], [*net.attention.parameters(), net.scale]]
        net.last.bias.requires_grad_(False)
        optimizers = [
            zero.OSS(share, optim) if ours else optim(share)
            for share, optim in zip(shares, OPTIMIZERS.values(), strict=True)
        ]
        model = zero.ShardedDDP(net, optimizers, overlap_param_gather=True) if ours else DistributedDataParallel(net)
        for step in range(4):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
                assert not ours or in_flight(optimizer)
        finals.append(model.module.state_dict())
    assert_same(*finals)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"broadcast_fp16": True}, torch.float32), ({"master_dtype": torch.float32}, torch.bfloat16)],
    ids=["broadcast_fp16", "masters"],
)
@beside
def test_compressed_and_with_masters_the_numbers_are_the_same(rank, world, options, dtype):
    """Beside the same without overlap."""
    finals = []
    for overlap in (False, True):
        net = Net().to(dtype)
        optimizer = zero.OSS(net.parameters(), OPTIMIZERS["adamw"], **options)
        model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=700, overlap_param_gather=overlap)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step).to(dtype)).float().square().mean().backward()
            optimizer.step()
        finals.append(model.state_dict())
    assert_same(*finals)


@beside
def test_compiled_modules_are_not_compiled_anew(rank, world):
    torch._dynamo.reset()
    net = Net()
    for block in net.blocks:
        block.compile(backend="eager")
    model, optimizer = sharded(net, "sgd")
    train(model, optimizer, rank, range(3))
    assert in_flight(optimizer)
    assert_same(model.state_dict(), trained_by_ddp(rank, range(3)).state_dict())


# --------------------------------------------------------------------------------------------------- what is waited for


@beside
def test_forward_waits_for_what_it_reads_when_it_reads_it(rank, world):
    """While the first block runs, later ones are still on their way; after forward nothing is."""
    net, model, optimizer = trained(rank)
    waiting = []
    for block in net.blocks:
        block.register_forward_hook(lambda *_: waiting.append(in_flight(optimizer)))
    loss_of(model, rank, 2)
    assert waiting == sorted(waiting, reverse=True)
    assert waiting[0] > waiting[1] > waiting[2], "a bias lies in the bucket of the next weight"
    assert not in_flight(optimizer)


def saved_by_torch(net, model, optimizer):
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()


def checkpointed(net, model, optimizer, folder):
    zero.checkpoint.save(folder, net, optimizer)
    other = Net()
    zero.checkpoint.load(folder, other, zero.OSS(other.parameters(), OPTIMIZERS["sgd"]))
    return other.state_dict()


READS = {
    "state_dict of the wrapper": lambda net, model, optimizer: model.state_dict(),
    "state_dict of the module": lambda net, model, optimizer: net.state_dict(),
    "full_state_dict": lambda net, model, optimizer: zero.full_state_dict(model),
    "parameters of the wrapper": lambda net, model, optimizer: {
        name.removeprefix("module."): value.data for name, value in model.named_parameters()
    },
    "an attribute of the wrapper": lambda net, model, optimizer: model.blocks[3][0].state_dict(),
    "state_dict of a child": lambda net, model, optimizer: net.blocks[3][0].state_dict(),
    "a copy": lambda net, model, optimizer: copy.deepcopy(model.module).state_dict(),
    "a pickle": lambda net, model, optimizer: pickle.loads(pickle.dumps(model.module)).state_dict(),
    "torch.save": saved_by_torch,
    "a copy after the module's state_dict": lambda net, model, optimizer: (
        net.state_dict() and copy.deepcopy(net).state_dict()
    ),
}


@beside
def test_whoever_reads_right_after_the_step_gets_new_values(rank, world, tmp_path):
    expected = trained_by_ddp(rank).state_dict()
    for what, read in {**READS, "a checkpoint": partial(checkpointed, folder=tmp_path)}.items():
        found = read(*trained(rank))
        shard = {name: value for name, value in expected.items() if name in found}
        if len(found) == 2:  # of a child: the names are its own
            found = {f"blocks.3.0.{name}": value for name, value in found.items()}
            shard = {name: expected[name] for name in found}
        assert found and all(torch.equal(found[name], value) for name, value in shard.items()), what


@beside
def test_forwards_of_the_inner_module_right_after_the_step_compute_with_new_values(rank, world):
    """Of the inner module, which the wrapper does not see, with gradients and without, and of a child."""
    expected = trained_by_ddp(rank)
    for call in (lambda net: net(batch(rank, 7)), lambda net: net.attention(*3 * [batch(rank, 7)])[0]):
        for grad in (True, False):
            net, _, optimizer = trained(rank)
            with torch.set_grad_enabled(grad):
                assert torch.equal(call(net.eval()), call(expected.eval()))
            assert not in_flight(optimizer)
            expected.train()


@beside
def test_kept_references_show_no_old_values(rank, world):
    """What was kept from before cannot be waited for: it is seen that nothing is there, and nothing can be written."""
    net, model, optimizer = trained(rank)
    for param in optimizer.param_groups[0]["params"]:
        if param.requires_grad:
            assert param.isnan().all() and param.data.isnan().all()
            assert param.dtype == torch.float32 and param.device.type == gpus.DEVICE
            if param.numel() > 1:
                with pytest.raises(RuntimeError, match="single memory location"):
                    param.data.clamp_(-1, 1)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"overlap_param_gather.*\.module"):
            copied(net)
    expected = trained_by_ddp(rank, range(3))
    assert_same(copy.deepcopy(model.module).state_dict(), trained_by_ddp(rank).state_dict())
    train(model, optimizer, rank, [2])
    assert_same(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("held", [False, True], ids=["wrapper", "module"])
@beside
def test_weights_loaded_right_after_the_step_are_trained_on(rank, world, held):
    finals = []
    other = {name: value.flip(0) if value.dim() else value for name, value in Net().state_dict().items()}
    for ours in (False, True):
        net = Net()
        model, optimizer = sharded(net, "sgd") if ours else plain("sgd")
        inner = (net if held else model) if ours else model.module
        for step in range(3):
            train(model, optimizer, rank, [step])
            if step == 1:
                inner.load_state_dict(other)
        finals.append(model.module.state_dict())
    assert_same(*finals)


@beside
def test_one_rank_may_read_while_the_other_does_not(rank, world):
    """Nothing is sent, and the other need not come: it waits until the first has all."""
    _, model, optimizer = trained(rank)
    sent = zero.traffic()
    found = model.state_dict() if rank == 0 else None
    assert zero.traffic() == sent
    found = found and {name: value.clone() for name, value in found.items()}
    dist.barrier()
    expected = trained_by_ddp(rank).state_dict()
    assert found is None or assert_same(found, expected) is None
    train(model, optimizer, rank, [2])


@ranks.raises(2, RuntimeError, "cast", "build OSS", timeout=30)
@overlapping("beside")
def test_a_cast_between_step_and_forward_is_refused(rank, world):
    net, model, _ = trained(rank)
    net.double()
    model(batch(rank, 2).double())


@beside
def test_backward_through_a_graph_from_before_the_step_waits(rank, world):
    """A second backward through a forward from before the step computes with new values, as without overlap."""
    finals = []
    for overlap in (False, True):
        net = Net()
        optimizer = zero.OSS(net.parameters(), OPTIMIZERS["sgd"])
        model = zero.ShardedDDP(net, optimizer, overlap_param_gather=overlap)
        loss = loss_of(model, rank, 0)
        for _ in range(2):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
        finals.append(model.state_dict())
    assert_same(*finals)


@ranks.raises(2, RuntimeError, "out of step", "step of OSS", timeout=30)
@overlapping("beside")
def test_ranks_out_of_step_raise_on_every_rank(rank, world):
    """Of uneven shards: Gloo, which stands for another backend here, waits for ever in a reduce-scatter."""
    _, model, optimizer = trained(rank, partition="whole")
    if rank:
        optimizer.step()
    train(model, optimizer, rank, [2])


@ranks.raises(2, ValueError, "overlap_param_gather True", "overlap_param_gather False", timeout=30)
@overlapping("beside")
def test_ranks_that_choose_differently_are_refused(rank, world):
    net = Net()
    zero.ShardedDDP(net, zero.OSS(net.parameters(), OPTIMIZERS["sgd"]), overlap_param_gather=rank == 0)


@beside
def test_what_is_in_flight_takes_no_second_copy(rank, world):
    """At the peak of a step and of the forward after it, with overlap and without."""
    peaks = []
    for overlap in (False, True):
        with Meter() as memory:
            net = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
            optimizer = zero.OSS(net.parameters(), SGD, lr=0.1)
            model = zero.ShardedDDP(net, optimizer, reduce_buffer_size=0, overlap_param_gather=overlap)
            for _ in range(2):
                model(torch.ones(1, 200)).sum().backward()
                optimizer.step()
            before = memory.live()
            memory.reset_peak()
            optimizer.step()
            model(torch.ones(1, 200))
            peaks.append(memory.peak() - before)
    parameters = sum(param.nbytes for param in model.parameters())
    waited, overlapped = peaks
    assert overlapped <= waited + 0.01 * parameters
    assert overlapped < 0.2 * parameters


@beside
def test_nothing_is_left_on_the_module(rank, world):
    """At rest the module has no hooks of ours, and its own stay; parameters are the tensors that they were."""
    net = Net()
    own = net.first.register_forward_pre_hook(lambda *_: None)
    model, optimizer = sharded(net, "sgd")
    addresses = [param.data_ptr() for param in net.parameters()]
    train(model, optimizer, rank, range(2))
    loss_of(model, rank, 2)
    assert [param.data_ptr() for param in net.parameters()] == addresses
    hooks = [
        hook
        for module in net.modules()
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
        for hook in hooks
    ]
    assert hooks == [own.id]


@gpus.cpu_only("shows what is different over Gloo")
@ranks.on(2)
def test_over_gloo_the_step_waits(rank, world):
    """Where nothing is sent beside the computing, the step waits: what was kept can be read at once."""
    net = Net()
    model, optimizer = sharded(net, "sgd")
    train(model, optimizer, rank, range(2))
    assert not in_flight(optimizer)
    expected = dict(trained_by_ddp(rank).named_parameters())
    assert all(torch.equal(param.data, expected[name]) for name, param in net.named_parameters())
