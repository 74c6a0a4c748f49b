"""Saved at one placement, loaded at another, in every configuration and by every kind of storage.

Here a subset in which each stage and each configuration is saved and loaded; `make matrix` sets ZERO_MATRIX=1 and runs
all 4 x 16 x 16.
"""

from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from saved import CONFIGS, Config, differences, load_and_go_on, read_plainly, save_and_go_on

import ranks
from matrix import WHOLE
from transports import TRANSPORTS, calling

PLACES = [(stage, world) for stage in range(4) for world in range(1, 5)]

NOISE = "model/last"  # added to every logit, so that its gradient is rounding alone, which Adam makes steps of


@dataclass(frozen=True)
class Row:
    """at, to: a stage and a number of ranks each."""

    config: Config
    at: tuple[int, int]
    to: list[tuple[int, int]]
    transport: str = TRANSPORTS[0]
    scheme: str = ""


if WHOLE:
    ROWS = {
        f"stage {at[0]} on {at[1]} {number}": Row(config, at, PLACES)
        for at in PLACES
        for number, config in enumerate(CONFIGS)
    }
else:
    ROWS = {
        "stage 0 on 2": Row(CONFIGS[2], (0, 2), [(3, 1), (1, 3)]),
        "stage 1 on 1": Row(CONFIGS[3], (1, 1), [(2, 2), (3, 2)]),
        "stage 2 on 2": Row(CONFIGS[0], (2, 2), [(2, 2), (0, 1), (1, 1)]),
        "stage 3 on 3": Row(CONFIGS[1], (3, 3), [(0, 2), (2, 2), (3, 2)]),
    }
ROWS |= {
    "between hosts, stage 3": Row(CONFIGS[3], (3, 2), [(1, 1), (3, 3)], TRANSPORTS[-1]),
    "between hosts, stage 2": Row(CONFIGS[2], (2, 2), [(3, 2)], TRANSPORTS[-1]),
    "objects": Row(Config(), (3, 2), [(0, 1), (3, 2)], scheme="objects://"),
    "offloaded": Row(Config(offload=True), (1, 2), [(3, 3)]),
    "replicated": Row(Config(replicas=2), (3, 4), [(3, 2)]),
    "moments in 16 bits": Row(Config("moments"), (3, 2), [(0, 1), (2, 2)]),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(1800 if WHOLE else 120)
@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
def test_any_placement_to_any_other(row, tmp_path):
    path = f"{row.scheme}{tmp_path}"
    stage, world = row.at
    at_save, in_the_end = ranks.run(calling, world, (row.transport, save_and_go_on, path, stage, row.config))[0]
    assert not differences(at_save, read_plainly(tmp_path / "00000001"))
    rough = row.config.masters or row.config.optim == "moments"
    stages = defaultdict(list)
    for stage, world in row.to:
        stages[world].append(stage)
    for world, chosen in stages.items():
        jobs = [(path, stage, row.config) for stage in chosen]
        for loaded in ranks.run(calling, world, (row.transport, load_and_go_on, jobs), timeout=90.0):
            for stage, result in zip(chosen, loaded, strict=True):
                if result:
                    assert not differences(at_save, result[0]), (stage, world)
                    check_end(in_the_end, result[1], same=(stage, world) == row.at, rough=rough)


def check_end(expected, found, *, same, rough):
    if same:
        assert not differences(expected, found)
        return
    assert expected.keys() == found.keys()
    tolerance = {"rtol": 0.1, "atol": 0.03} if rough else {"rtol": 1e-4, "atol": 1e-6}
    for name, value in expected.items():
        if name.startswith("model/") and name != NOISE:
            torch.testing.assert_close(found[name], value, check_dtype=False, **tolerance)
