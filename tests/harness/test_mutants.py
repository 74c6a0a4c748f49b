"""Every mutant fits to what `zero` is now, and is put in where tests train."""

import re

import pytest

import mutants
import mutations
from processes import python

TABLE = mutations.load()


@pytest.mark.slow
def test_each_of_many_fits_and_says_what_goes_wrong():
    assert len(TABLE) >= 44
    for one in TABLE.values():
        for target in one.targets:
            one.fit(target)
        assert re.fullmatch(r"\S.{20,}\.", one.says)


@pytest.mark.slow
def test_the_environment_puts_one_in_and_an_unknown_name_is_an_error_with_all_names():
    kept = "import zero; print(zero.FSDP.reshard.__wrapped__)"
    assert "reshard" in python("-c", kept, ZERO_MUTANT="dropped-forward-leaves-its-unit-full").stdout
    written = python("-c", kept, ZERO_MUTANT="nonsense", code=1).stderr
    assert all(name in written for name in ("nonsense", "late-gather", "old-master"))


def reshard(before, self, gone):  # type: ignore[no-untyped-def]
    """As a mutant of a method that was changed since."""


@pytest.mark.parametrize(("target", "why"), [("FSDP.gone", "no FSDP.gone"), ("FSDP.reshard", "has no argument gone")])
def test_one_that_does_not_fit_any_more_is_an_error_with_its_name(target, why):
    with pytest.raises(mutations.Misfit, match=f"reshard does not fit: .*{why}"):
        mutations.Mutant(reshard, (target,)).put_in()


WRITTEN = "FAILED tests/oss/test_oss.py::test_of[a b] - assert 1 == 2\n1 failed, 3 passed in 4 s\n"


def test_a_failing_test_catches_one_only_if_it_fits():
    assert mutants.judged(WRITTEN, mutants.QUICK) == (mutants.QUICK, "tests/oss/test_oss.py::test_of[a b]")
    misfit = "the mutant late-gather does not fit: zero has no ShardGroup.gather"
    assert mutants.judged(WRITTEN + misfit, mutants.QUICK)[0] == mutants.MISFIT
    assert mutants.judged("ERROR tests/oss/test_oss.py\n1 error in 2 s", mutants.QUICK)[0] == mutants.ERROR
    in_a_fixture = "ERROR tests/oss/test_oss.py::test_of - zero.Failed\n1 error in 2 s"
    assert mutants.judged(in_a_fixture, mutants.QUICK) == (mutants.QUICK, "tests/oss/test_oss.py::test_of")


def test_each_was_caught_by_a_test_that_there_is():
    assert mutants.tests_before().keys() == TABLE.keys()
    for test in mutants.tests_before().values():
        file, name = test.partition("[")[0].split("::")
        assert re.search(rf"\b{name}\b", (mutants.CAUGHT_BY.parents[2] / file).read_text()), test
