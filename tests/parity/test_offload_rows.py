"""Shards and what optimizers step lie in files: the numbers are those of training without. More programs are rows of
test_axes.py. What lies in the memory of the CPU is compared in tests/offload, where there is a device beside it."""

import tempfile
from functools import partial

import torch
from torch.optim import Adafactor, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

import zero
from rows import Rows, momentum
from zoo import CASES, OddNet, WideMLP, odd_loss

DISK = {"offload": zero.DiskOffload(tempfile.gettempdir())}
adamw = partial(AdamW, lr=0.01)
row = Rows("offload: files", __name__, options=DISK, optim=momentum, cpu_only="there stage 0 is stepped on the GPU")


def in_buckets(t, i):
    (inputs,) = CASES["wide"].batch(t.rank, i).inputs
    t.update(t.note(t.m(inputs).square().mean()))


row.of("SGD steps files")
row.of("AdamW steps parameters of every odd kind", lambda t, i: t.update(t.note(odd_loss(t.m, t.rank, i))), net=OddNet)
row.of("fused Adam steps several buckets", in_buckets, net=WideMLP, optim=partial(Adam, lr=0.01, fused=True))
row.of("whole parameters are stepped", optim=adamw, options={**DISK, "partition": "whole"})
row.of(
    "an optimizer that is not elementwise steps all at once",
    optim=partial(Adafactor, lr=0.01),
    options={**DISK, "partition": "whole"},
)


@row(optim=adamw)
def a_schedule_is_followed_and_state_loaded(t, i):
    t.kept.schedule = t.kept.schedule if i else StepLR(t.o, 1, gamma=0.5)
    t.update(t.loss(i))
    t.kept.schedule.step()
    t.o.load_state_dict(t.o.state_dict())


@row(optim=adamw, steps=4)
def steps_with_a_closure_and_without_take_turns(t, i):
    def closure():
        t.o.zero_grad()
        loss = t.loss(i)
        loss.backward()
        return loss

    if i % 2:
        t.note(t.o.step(closure))
    else:
        closure()
        t.o.step()


@row()
def hooks_see_one_step(t, i):
    t.kept.steps = t.kept.steps if i else []
    for add in (t.o.register_step_pre_hook, t.o.register_step_post_hook) if i == 0 else ():
        add(lambda *_: t.kept.steps.append(1))
    t.update(t.loss(i))
    t.note(torch.tensor(len(t.kept.steps)))


test_rows = row.tests()
