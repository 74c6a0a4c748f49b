"""The harness itself: a broken one would let every other test pass."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 0.2)


def _sum(rank, world, start):
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return rank, world, value


@pytest.mark.parametrize("world", [3, 1])
def test_results_come_by_rank(world):
    total = sum(10 + rank for rank in range(world))
    found = ranks.run(_sum, world, args=(torch.tensor(10),))
    assert found == [(rank, world, torch.tensor([total])) for rank in range(world)]


def _tensors(rank, world, given):
    weight = nn.Parameter(torch.arange(1000.0))
    return {"view": (weight * 2)[3:7:2], "half": torch.ones((), dtype=torch.bfloat16), "given": given}


def test_tensors_arrive_as_detached_copies():
    given = torch.tensor([[True, False]])
    (result,) = ranks.run(_tensors, world=1, args=(given,))
    expected = {"view": torch.tensor([6.0, 10.0]), "half": torch.ones((), dtype=torch.bfloat16), "given": given}
    torch.testing.assert_close(result, expected)
    assert not result["view"].requires_grad
    assert result["view"].untyped_storage().nbytes() == 8
    result["given"].logical_not_()  # writable, and nobody else's
    assert given.tolist() == [[True, False]]


def _train(rank, world):
    drawn = torch.rand(())
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return drawn.item(), model.module.weight.tolist()


def test_ranks_train_after_autograd_in_this_process_and_all_draw_the_same_numbers():
    nn.Linear(2, 2)(torch.ones(2)).sum().backward()
    first, *others = [*ranks.run(_train), *ranks.run(_train)]
    assert others == [first] * 3


def _pid(rank, world):
    return os.getpid()


def _raise_on_rank_1(rank, world):
    if rank == 1:
        raise ValueError("rank 1 dislikes this")
    dist.barrier()


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_processes_are_kept_until_a_run_fails_which_tells_the_state_of_each_rank():
    before = ranks.run(_pid)
    assert set(ranks.run(_pid, fresh=True)).isdisjoint(before)
    assert ranks.run(_pid) == before
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_raise_on_rank_1)
    assert set(ranks.run(_pid)).isdisjoint(before)
    waiting, raised = caught.value.outcomes
    assert waiting.verdict.startswith("was still running")
    assert "in barrier" in waiting.detail and "in _raise_on_rank_1" in waiting.detail
    assert raised.verdict == "raised ValueError: rank 1 dislikes this"
    assert raised.detail.startswith("Traceback") and "in _raise_on_rank_1" in raised.detail
    for outcome in (waiting, raised):
        assert outcome.verdict in str(caught.value)
        assert "ranks.py" not in outcome.detail.replace("test_ranks.py", "")


def _hang_on_rank_1(rank, world):
    if rank == 1:
        time.sleep(600)


@pytest.mark.slow
def test_hang_names_the_rank_and_the_line():
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(_hang_on_rank_1, timeout=0.3)
    returned, hung = caught.value.outcomes
    assert returned.verdict == "returned"
    line = _hang_on_rank_1.__code__.co_firstlineno + 2
    assert f'test_ranks.py", line {line} in _hang_on_rank_1' in hung.detail
    assert "--- rank 1 was still running" in str(caught.value)


def _die_on_rank_0(rank, world):
    if rank == 0:
        signal.raise_signal(signal.SIGSEGV)  # in this thread, whose stack is told


@pytest.mark.usefixtures("short_grace")
def test_death_of_a_rank_is_told():
    with pytest.raises(ranks.RankError, match=f"rank 0 died with exit code -{signal.SIGSEGV.value}") as caught:
        ranks.run(_die_on_rank_0)
    assert "in _die_on_rank_0" in caught.value.outcomes[0].detail


def _raise(rank, world):
    raise ValueError(f"key {rank}")


@pytest.mark.slow
@pytest.mark.usefixtures("short_grace")
def test_an_error_is_expected_of_every_rank():
    assert ranks.expect_error(_raise, 2, ValueError, "k.y", r"\d") == ["key 0", "key 1"]
    with pytest.raises(ranks.RankError, match="should raise on each of 2 rank"):
        ranks.expect_error(_raise, 2, TypeError)
    with pytest.raises(ranks.RankError, match="'key 0'"):
        ranks.expect_error(_raise, 2, ValueError, "key 0")


@ranks.on(2)
def _fails_on_rank_1(rank, world):
    told = f"this is rank {rank}"
    assert "rank 0" in told


@ranks.raises(2, ValueError)
def _raises_other_words(rank, world, words):
    raise ValueError("other words")


def test_a_test_on_ranks_fails_where_a_rank_does_and_tells_the_values_there():
    with pytest.raises(ranks.RankError, match=r"rank 1 raised AssertionError(.|\n)*told = 'this is rank 1'"):
        _fails_on_rank_1()
    with pytest.raises(ranks.RankError, match=r"ValueError and .words. and .these."):
        _raises_other_words(words=["words", "these"])


def _warn(rank, world):
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_warnings_on_ranks_meet_the_filters_of_the_test():
    ranks.expect_error(_warn, 2, UserWarning, "careful")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks.run(_warn)
