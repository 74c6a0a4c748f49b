"""`missing_ok`: where nothing was saved yet a run starts afresh, on every rank alike; all else raises as ever."""

import re
from pathlib import Path
from unittest import mock

import pytest
from saved import Counting, adam, differences, tiny, train, whole

import ranks
import zero
from transports import TRANSPORTS, calling
from zero.checkpoint import CheckpointError, storage
from zero.shards.log import logger


def start(path, stage):
    """What a script does each time it is started: its steps go on from those before."""
    model, optimizer = zero.setup(tiny(), adam(), stage=stage)
    before = whole(model, optimizer)
    extra = zero.checkpoint.load(path, model, optimizer, resume=[], missing_ok=True)
    if extra is None:
        assert not differences(before, whole(model, optimizer))
    train(model, optimizer, 1)
    step = 1 if extra is None else extra["step"] + 1
    zero.checkpoint.save(path, model, optimizer, resume=[], extra={"step": step}).wait()
    return step


def starts(rank, world, path, stage):
    """Whatever the others see of a file system that is slow to tell: they are not asked."""
    asked, lines = mock.Mock(side_effect=storage.resolve), []
    said = mock.patch.object(logger, "info", lambda text, *given: lines.append(text % given))
    with said, mock.patch.object(storage, "resolve", asked):
        steps = [start(path, stage), start(path, stage)]
    assert bool(asked.called) == (rank == 0)
    return steps, [line for line in lines if "afresh" in line]


ROWS = [(0, TRANSPORTS[0], ""), (1, TRANSPORTS[-1], ""), (2, TRANSPORTS[0], "objects://"), (3, TRANSPORTS[-1], "")]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "transport", "scheme"), [*ROWS, (3, TRANSPORTS[0], "objects://")])
def test_a_script_starts_afresh_once_and_then_goes_on(stage, transport, scheme, tmp_path):
    path = f"{scheme}{tmp_path / 'run'}"
    first, second = ranks.run(calling, 2, (transport, starts, path, stage))
    assert first[0] == second[0] == [1, 2]
    assert not second[1] and len(first[1]) == 1 and re.search(r"run is not there.*afresh", first[1][0])


def test_in_memory():
    model = tiny()
    assert zero.checkpoint.load("memory://afresh", model, missing_ok=True) is None
    zero.checkpoint.save("memory://afresh", model)
    assert zero.checkpoint.load("memory://afresh", model, missing_ok=True) == {}
    with pytest.raises(CheckpointError, match="is not there"):
        zero.checkpoint.load("memory://elsewhere", model)


def logs(path):
    """What a script may write before its first save, and what a save leaves that was killed."""
    for name in ("events.out.tfevents.1", "config.yaml", "00000001/rank-00000.safetensors.partial"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("half")


def half_of_latest(path):
    zero.checkpoint.save(path, tiny())
    (path / "latest").write_text("")


def without_latest(path):
    for _ in range(2):
        zero.checkpoint.save(path, tiny())
    (path / "latest").unlink()


def of_another_model(path):
    zero.checkpoint.save(path, tiny(9))


def altered(path):
    index = Path(zero.checkpoint.save(path, tiny()).path, "index.json")
    index.write_text(index.read_text().replace("F32", "F16", 1))


PLACES = {
    "nothing": (lambda path: None, ""),
    "logs": (logs, ""),
    "an empty latest": (half_of_latest, "latest names ''"),
    "no latest": (without_latest, "has the checkpoints 00000001, 00000002"),
    "another model": (of_another_model, "another model"),
    "an altered index": (altered, "altered"),
}


@pytest.mark.parametrize("scheme", ["", "objects://"])
def test_what_is_damaged_or_of_another_model_is_refused_as_ever(scheme, tmp_path):
    """words: none where a run starts afresh."""
    for name, (make, words) in PLACES.items():
        path, told = tmp_path / name, []
        make(path)
        for missing_ok in (False, True):
            told.append(ranks.refusal(lambda: zero.checkpoint.load(f"{scheme}{path}", tiny(), missing_ok=missing_ok)))  # noqa: B023
        assert re.search(f"^CheckpointError: .*{words}", told[0]), f"{name}: {told}"
        assert told[1] == (told[0] if words else ""), f"{name}: {told}"


def test_a_first_save_that_was_killed_between_its_index_and_latest_is_whole(tmp_path):
    """A job that is started again by itself would raise for ever."""
    put = storage.Place.put

    def put_all_but_latest(place, data):
        if place.name == "latest":
            raise KeyboardInterrupt
        put(place, data)

    model = Counting(3)
    killed = mock.patch.multiple(storage.Place, put=put_all_but_latest, remove=mock.DEFAULT)
    with pytest.raises(KeyboardInterrupt), killed:
        zero.checkpoint.save(tmp_path, model, extra={"step": 1})
    assert zero.checkpoint.load(tmp_path, model, missing_ok=True) == {"step": 1}
    zero.checkpoint.save(tmp_path, model, extra={"step": 2})
    assert zero.checkpoint.load(tmp_path, model, missing_ok=True) == {"step": 2}


@ranks.on(2)
def test_all_ranks_ask_alike(rank, world, tmp_path):
    model = zero.FSDP(tiny())
    told = ranks.refusal(lambda: zero.checkpoint.load(tmp_path, model, missing_ok=rank == 0))
    assert re.search("differ between ranks.*missing_ok", told), told
