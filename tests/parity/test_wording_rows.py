"""What errors call the things that went wrong, and the remedy that they name."""

import os
import tempfile

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import matrix
import ranks
import zero
from rows import WIDTH, Net, Rows, sgd, trains
from runs import norm_of_gradients
from transports import TRANSPORTS, by
from zoo import data

KIND = "C5: words of errors"
row = Rows(KIND, __name__)


def two(params):
    """A second OSS has params(the module)."""

    def program(t, i):
        if i == 0:
            t.kept.other = zero.OSS(params(t.n), sgd)
        trains(t, i)
        t.loss(i).backward()
        t.kept.other.step()

    return program


HELD = {"or_refused": r"(?i)other (OSS|wrapper|optimizer)|held by|two OSS|FSDP"}
row.of("two OSS have all parameters", two(lambda n: n.named_parameters()), **HELD)
row.of("two OSS have all parameters without names", two(lambda n: n.parameters()), **HELD)
row.of("a second OSS has one layer", two(lambda n: n.last.named_parameters()), **HELD)


DO = {
    "step": lambda t: t.o.step(),
    "forward": lambda t: t.loss(9),
    "norm": lambda t: norm_of_gradients(t.m),
    "clipping by the norm": lambda t: clip_grad_norm_(t.m.parameters(), 1.0),
    "state": lambda t: zero.full_optimizer_state_dict(t.m, t.o, to=None),
}


def apart(zeroth, first):
    """What rank 0 does where the other does something else."""

    def program(t, i):
        if i == 2:
            t.loss(i).backward()
            DO[first if t.rank else zeroth](t)
        trains(t, i)

    words = ("(?s)^(?!.*a sum over the ranks)", f"(?<!out of ){zeroth.split()[-1]}")
    row.of(f"{zeroth} beside {first}", program, steps=4, same=(), refused={2: words, 3: words})


apart("step", "forward")
apart("step", "state")
apart("norm", "forward")
apart("norm", "step")
apart("clipping by the norm", "forward")
apart("clipping by the norm", "state")


def replaced(replace, on=(0, 1)):
    """replace(the module, that of another FSDP) on these ranks."""

    def program(t, i):
        if i == 0:
            t.kept.other = zero.FSDP(Net())
            replace(t.n, t.kept.other.module) if t.rank in on else None
        trains(t, i)

    return program


LOST = {"same": (), "refused": {3: r"(last|blocks\.\d\.up)\.weight"}}
row.of("a weight is another FSDP's", replaced(lambda n, o: setattr(n.last, "weight", o.last.weight)), **LOST)
row.of("on one rank alone", replaced(lambda n, o: setattr(n.last, "weight", o.last.weight), on=[1]), **LOST)
row.of("a layer is another FSDP's", replaced(lambda n, o: setattr(n, "last", o.last)), **LOST)
row.of(
    "a layer is another one",
    replaced(lambda n, _: setattr(n.blocks[0], "up", n.blocks[1].up)),
    same={2, 3},
    ddp={"find_unused_parameters": True},
)


def returned(what):
    """A hook after the gradients of a weight returns what(the weight)."""

    def program(t, i):
        if i == 0:
            t.n.first.weight.register_post_accumulate_grad_hook(what)
        trains(t, i)

    return program


NONE = {"same": (), "refused": dict.fromkeys(range(4), r"(?i)return None")}
row.of("a hook after a gradient returns the parameter", returned(lambda param: param))
row.of("a hook after a gradient returns the gradient", returned(lambda param: param.grad), **NONE)
row.of("a hook after a gradient returns a copy", returned(lambda param: param.detach().clone()), **NONE)
test_words = row.tests()

ENDS = {
    "it ends": lambda model, optimizer: None,
    "it evaluates": lambda model, optimizer: model.eval()(torch.ones(1, WIDTH)),
    "it leaves the group": lambda model, optimizer: torch.distributed.destroy_process_group(),
    "it collects state": zero.full_optimizer_state_dict,
    "it saves": lambda model, optimizer: zero.checkpoint.save(tempfile.mkdtemp(), model, optimizer),
}


def ended(rank, world, stage, end, transport):
    with by(transport):
        model, optimizer = zero.setup(Net(), sgd, stage=stage)
        for i in range(4 if rank else 2):
            model(data(4, WIDTH, rank=rank, step=i)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            ENDS[end](model, optimizer)
        os._exit(0)


@pytest.mark.slow
@matrix.combined("stage, end, transport", [2, 3], ENDS, TRANSPORTS)
def test_where_a_rank_ends_early_the_other_is_told_of_join(end, stage, transport):
    with pytest.raises(ranks.RankError) as raised:
        ranks.run(ended, args=(stage, end, transport), timeout=20)
    assert "zero.join" in raised.value.outcomes[1].message
