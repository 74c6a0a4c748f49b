"""Shards and what optimizers step lie in files: the numbers are those of training without. What lies in the memory of
the CPU is compared in tests/offload, where there is a device beside it."""

import tempfile
from functools import partial

import torch
from torch.nn.utils import clip_grad_norm_
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


@row(tolerance=1e-5)
def backwards_add_up(t, i):
    with zero.no_sync(t.m) if t.stage != 1 else t.m.no_sync():
        t.loss(10 + i).backward()
    t.loss(20 + i).backward()
    t.update(t.loss(i))


@row(tolerance=1e-5)
def gradients_are_clipped(t, i):
    t.update(t.loss(i), lambda t: t.note(clip_grad_norm_(t.m.parameters(), 0.05)))


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


@row(same={1, 2})
def weights_are_written_between_steps(t, i):
    for param in t.n.parameters() if i == 1 else ():
        param.data.mul_(0.9)
    t.update(t.loss(i))


@row(same={3})
def shards_are_written_between_steps(t, i):
    with torch.no_grad():
        for param in t.n.parameters() if i == 1 else ():
            param.mul_(0.9)
    t.update(t.loss(i))


@row(steps=4)
def an_infinite_gradient_of_one_rank_skips_the_step_on_all(t, i):
    t.kept.scaler = t.kept.scaler if i else torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = t.loss(i) * (torch.inf if (i, t.rank) == (1, 1) else 1)
    t.kept.scaler.scale(loss).backward()
    t.kept.scaler.step(t.o)
    t.kept.scaler.update()
    t.note(torch.tensor(t.kept.scaler.get_scale()))
    t.o.zero_grad()


@row()
def hooks_see_one_step(t, i):
    t.kept.steps = t.kept.steps if i else []
    for add in (t.o.register_step_pre_hook, t.o.register_step_post_hook) if i == 0 else ():
        add(lambda *_: t.kept.steps.append(1))
    t.update(t.loss(i))
    t.note(torch.tensor(len(t.kept.steps)))


test_rows = row.tests()
