"""Lightning Fabric at stages 1, 2, 3, beside the same script with strategy="ddp"."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from calls import on_ranks

from sidebyside import close

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning


@cache
def trained(stage: int) -> list[Any]:
    return on_ranks("fabrics", "all_cases", stage)


@pytest.mark.parametrize("name", ["plain", "in bfloat16", "clipped"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_trains_to_the_numbers_of_ddp(stage, name):
    tolerance = 1e-6 if name == "clipped" else 0.0
    for found, expected in zip(trained(stage), trained(0), strict=True):
        assert found[name][0] == pytest.approx(expected[name][0], rel=tolerance, abs=0)
        assert list(found[name][1]) == list(expected[name][1])
        for weight, value in expected[name][1].items():
            assert close(found[name][1][weight], value, tolerance), weight


@pytest.mark.parametrize(("kind", "stages"), [("full", [0, 2, 3]), ("sharded", [1, 3])])
def test_a_run_goes_on_at_any_stage_where_another_was_saved(kind, stages, tmp_path):
    on_ranks("fabrics", "resumed", kind, stages, str(tmp_path))


def test_weights_of_compiled_blocks_have_the_names_of_the_plain_module(tmp_path):
    on_ranks("fabrics", "compiled_inside", str(tmp_path))


def test_what_cannot_be_done_is_refused_on_every_rank():
    on_ranks("fabrics", "refusals")
