"""No save or load takes more memory than what it is asked for on the rank that gets it, and the tensors of one unit.

On the CPU a device's memory is the host's: all that lives is counted, in multiples of the model.
"""

from __future__ import annotations

import pytest
from calls import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries: too few workers, no GPU

LOAD_BOTH, LOAD_STATE = "_load_optimizer_and_scheduler", "load_optimizer_state_dict"
SAVED = {
    "accelerate": {"get_state_dict": 1, "save_model": 1, "save_state": 2, "load_state": 0},
    "narrow": {"get_state_dict": 0.5, "save_model": 0.5},
    "trainer": {"_save_checkpoint": 2, "_load_from_checkpoint": 0, "_load_best_model": 0, LOAD_BOTH: 0},
    "adapter": {"_save_checkpoint": 0, "_load_from_checkpoint": 0, "_load_best_model": 0, LOAD_BOTH: 0},
    "prompts": {"_save_checkpoint": 0, "_load_from_checkpoint": 0, "_load_best_model": 0, LOAD_BOTH: 0},
    "lightning": {"save_checkpoint": 3, "load_checkpoint": 0, "load_model_state_dict": 0, LOAD_STATE: 0},
    "fabric": {"save": 3, "load": 0},
}
"""What rank 0 gets: the weights are 1, and Adam's state is 2, of which Accelerate and the Trainer save one by one.
An adapter, or prompts, and their state are small."""

LOADS_STATE = ("load_state", LOAD_BOTH, LOAD_STATE, "load")
SHARDS = {"adapter": 0, "prompts": 0}
"""Of the state on each of two ranks, which replace those that it had: 1 where not said."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", SAVED)
def test_saving_and_loading_takes_what_is_asked_for_and_a_unit(way, stage, tmp_path):
    for rank, (found, unit) in enumerate(on_ranks("peaks", "all_of", way, stage, str(tmp_path))):
        assert found.keys() == SAVED[way].keys()
        for name, result in SAVED[way].items():
            asked = result if rank == 0 else 0
            asked += SHARDS.get(way, 1) * (name in LOADS_STATE)
            assert found[name] <= asked + 2.1 * unit, (rank, name, found[name], unit)
