"""Saved at stage s on m ranks, loaded at stage t on n ranks.

Here a subset that covers every pair of stages and every pair of numbers of ranks, with every configuration at every
stage; `make matrix` sets ZERO_MATRIX=1 and runs all 4 x 16 x 16.
"""

from collections import defaultdict

import pytest
import torch
from saved import CONFIGS, differences, load_and_go_on, read_plainly, save_and_go_on

import ranks
from matrix import WHOLE
from transports import between_hosts

PLACES = [(stage, world) for stage in range(4) for world in range(1, 5)]


NOISE = "model/last"  # added to every logit, so that its gradient is rounding alone, which Adam makes steps of


def configurations(stage, world):
    return CONFIGS if WHOLE else [CONFIGS[(stage + world) % 4]]


def destinations(stage, world):
    if WHOLE:
        return PLACES
    steps = sorted({0, (stage - world) % 4})  # for each stage all four as the world varies, and the other way round
    return [((stage + k) % 4, (world - 1 + k) % 4 + 1) for k in steps]


@pytest.mark.matrix
@pytest.mark.timeout(1800 if WHOLE else 120)
@pytest.mark.parametrize(("stage", "world"), PLACES)
def test_any_stage_and_world_to_any_other(stage, world, tmp_path):
    runs = []
    for number, config in enumerate(configurations(stage, world)):
        path = str(tmp_path / str(number))
        results = ranks.run(save_and_go_on, world, (path, stage, config))
        at_save, in_the_end = results[0]
        assert not differences(at_save, read_plainly(tmp_path / str(number) / "00000001"))
        runs.append((path, config, at_save, in_the_end))

    jobs = defaultdict(list)
    for to_stage, to_world in destinations(stage, world):
        jobs[to_world] += [(run, to_stage) for run in runs]
    for to_world, chosen in jobs.items():
        given = [(path, to_stage, config) for (path, config, _, _), to_stage in chosen]
        for rank, loaded in enumerate(ranks.run(load_and_go_on, to_world, (given,), timeout=90.0)):
            for ((_, config, at_save, in_the_end), to_stage), result in zip(chosen, loaded, strict=True):
                where = f"{config}: stage {stage} on {world} -> stage {to_stage} on {to_world}, rank {rank}"
                if result:
                    then, later = result
                    assert not differences(at_save, then), where
                    same = (stage, world) == (to_stage, to_world)
                    check_end(in_the_end, later, where, same=same, rough=config.masters)


def save_between_hosts(rank, world, *args):
    with between_hosts():
        return save_and_go_on(rank, world, *args)


def load_between_hosts(rank, world, *args):
    with between_hosts():
        return load_and_go_on(rank, world, *args)


@pytest.mark.parametrize(("stage", "to_stage"), [(3, 2), (2, 3)])
def test_between_hosts_too(stage, to_stage, tmp_path):
    """Some of what `make hosts` runs in this way."""
    path, config = str(tmp_path / "0"), CONFIGS[stage]
    at_save, in_the_end = ranks.run(save_between_hosts, 3, (path, stage, config))[0]
    for result in ranks.run(load_between_hosts, 2, ([(path, to_stage, config)],)):
        for then, later in result:
            assert not differences(at_save, then)
            check_end(in_the_end, later, "between hosts", same=False, rough=config.masters)


def check_end(expected, found, where, *, same, rough):
    if same:
        assert not differences(expected, found), where
        return
    assert expected.keys() == found.keys(), where
    tolerance = {"rtol": 0.1, "atol": 0.03} if rough else {"rtol": 1e-4, "atol": 1e-6}
    for name, value in expected.items():
        if name.startswith("model/") and name != NOISE:
            torch.testing.assert_close(
                found[name], value, check_dtype=False, msg=lambda m, n=name: f"{where}: {n}: {m}", **tolerance
            )
