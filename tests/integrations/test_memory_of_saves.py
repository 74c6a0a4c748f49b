"""No save or load takes more memory than what it is asked for on the rank that gets it, and the tensors of one unit.

On the CPU a device's memory is the host's: all that lives is counted, in multiples of the model.
"""

import pytest
from calls import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries: too few workers, no GPU

LOAD_BOTH, LOAD_STATE = "_load_optimizer_and_scheduler", "load_optimizer_state_dict"
SAVED = {
    "accelerate": {"get_state_dict": 1, "save_model": 1, "save_state": 2, "load_state": 0},
    "narrow": {"get_state_dict": 0.5, "save_model": 0.5},
    "trainer": {"_save_checkpoint": 2, "_load_from_checkpoint": 0, "_load_best_model": 0, LOAD_BOTH: 0},
    "own": {"save_model": 1},
    "adapter": {"_save_checkpoint": 0, "_load_from_checkpoint": 0, "_load_best_model": 0, LOAD_BOTH: 0},
    "lightning": {"save_checkpoint": 3, "load_checkpoint": 0, "load_model_state_dict": 0, LOAD_STATE: 0},
    "fabric": {"save": 3, "load": 0},
    "accelerate SHARDED": {"get_state_dict": 1, "save_model": 1, "save_state": 0, "load_state": 0},
    "trainer SHARDED": {"_save_checkpoint": 1, "_load_from_checkpoint": 0, "_load_best_model": 0, LOAD_BOTH: 0},
    "lightning sharded": {"save_checkpoint": 0, "load_checkpoint": 0, "load_model_state_dict": 0, LOAD_STATE: 0},
    "fabric sharded": {"save": 0, "load": 0},
}
"""What rank 0 gets: the weights are 1, and Adam's state is 2, of which Accelerate and the Trainer save one by one.
Shards are written from where they lie; the Trainer saves weights for transformers beside them. An adapter
and its state are small."""

TAKES_STATE = {
    "accelerate": "load_state",
    "trainer": LOAD_BOTH,
    "lightning": LOAD_STATE,
    "fabric": "load",
    "trainer SHARDED": LOAD_BOTH,
    "lightning sharded": LOAD_STATE,
}
"""What gives each rank new state. Accelerate's and Fabric's shards are read into the state that there is."""

OF_TRANSFORMERS = ("trainer", "own", "adapter", "trainer SHARDED")

SHARDS = 1
"""Of the state on each of two ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", SAVED)
def test_saving_and_loading_takes_what_is_asked_for_and_a_unit(way, stage, tmp_path):
    if way in OF_TRANSFORMERS:
        pytest.importorskip("transformers")  # has no build for Python 3.10
    for rank, (found, unit) in enumerate(on_ranks("peaks", "all_of", way, stage, str(tmp_path))):
        assert found.keys() == SAVED[way].keys()
        for name, result in SAVED[way].items():
            asked = result if rank == 0 else 0
            asked += SHARDS * (name == TAKES_STATE.get(way))
            assert found[name] <= asked + 2.1 * unit, (rank, name, found[name], unit)
