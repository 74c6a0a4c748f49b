"""A save or load at any moment of a step, on all ranks or on one alone: what it writes is what there is, or every rank
raises, at once."""

import re
from itertools import product

import pytest
import torch
from saved import adam
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
import zero
from runs import take_step
from transports import TRANSPORTS, by

MOMENTS = {
    "backward": lambda model, optimizer, act: model.module[1][0].weight.register_post_accumulate_grad_hook(act),
    "a gradient": lambda model, optimizer, act: model.module[1].register_forward_hook(
        lambda module, given, out: out.register_hook(act) and None
    ),
    "forward": lambda model, optimizer, act: model.module[1][1].register_forward_hook(act),
    "before the step": lambda model, optimizer, act: optimizer.register_step_pre_hook(act),
    "after the step": lambda model, optimizer, act: optimizer.register_step_post_hook(act),
}
REFUSED = {"backward", "a gradient", "forward"}
"""At stage 3."""


def build(stage):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    wrapped = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential})} if stage == 3 else {}
    return zero.setup(model, adam(), stage=stage, **wrapped)


def at_a_moment(rank, world, transport, stage, moment, steps, call, path):
    """What each rank is told where all act, then where one does; and the weights that were saved, and those then."""
    with by(transport):
        model, optimizer = build(stage)
        zero.checkpoint.save(path, model, optimizer)
        acting, then = [], []

        def act(*_):
            if rank in acting:
                acting.clear()
                call(path, model, optimizer)

        handle = MOMENTS[moment](model, optimizer, act)
        batch = torch.randn(4, 8)

        def step():
            take_step(optimizer, model(batch).square().mean())

        for _ in range(steps):
            step()
        then.append(zero.full_state_dict(model, to=None))
        acting += range(world)
        all_told = ranks.refusal(step)
        assert not acting
        then.append(zero.full_state_dict(model, to=None))
        if not all_told and call is zero.checkpoint.save:
            other = build(0)[0]
            zero.checkpoint.load(path, other)
            saved = zero.full_state_dict(other, to=None)
            expected = then[moment == "after the step"]
            assert all(torch.equal(saved[name], value) for name, value in expected.items())
        step()
        acting += [1]
        one_told = ranks.refusal(lambda: [step() for _ in range(2)])
        handle.remove()
        return all_told, one_told


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "stage", "transport"), [*product(MOMENTS, (1, 2, 3), TRANSPORTS)])
def test_a_save_in_a_step_is_right_or_refused_on_every_rank(moment, stage, transport, tmp_path):
    for steps in (0, 4) if stage == 3 else (2,):
        args = (transport, stage, moment, steps, zero.checkpoint.save, str(tmp_path / str(steps)))
        found = ranks.run(at_a_moment, 2, args)
        words = r"zero\.checkpoint\.save was called .*within forward, backward.*Call it between steps"
        for all_told, one_told in found:
            refused = stage == 3 and moment in REFUSED
            assert re.search(f"^CheckpointError: {words}", all_told) if refused else not all_told, all_told
            assert re.search(words if refused else "out of step", one_told), one_told
        assert "zero.checkpoint.save" in found[1][1]
