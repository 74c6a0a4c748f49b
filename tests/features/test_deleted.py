"""Any folder of zero/features can be deleted, and all of them: what is left trains as before, and whoever asks for what
is gone is told which folder is missing.

Every test takes a copy of zero/ from which folders are deleted. `make matrix` runs all of the core's own tests without
each folder by itself; the suite runs a few without all of them.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = sorted(path.parent.name for path in ROOT.glob("zero/features/*/__init__.py"))
WHOLE = bool(os.environ.get("ZERO_MATRIX"))

NAMES = {
    "int8": ["Int8"],
    "offload": ["CPUOffload", "DiskOffload"],
    "replicas": ["fault_tolerant"],
    "step_in_backward": ["step_in_backward"],
}
"""The public names that each feature brings."""

OPTIONS = {
    "gathers": "zero.ShardedDDP(model, zero.OSS(model.parameters()), overlap_param_gather=True)",
    "host_memory": "zero.comm.configure(host_memory='ptracer')",
    "meta": "zero.FSDP(model, param_init_fn=print)",
    "offload": "zero.FSDP(model, offload='anything')",
    "hybrid": "zero.FSDP(model, sharding_strategy='NO_SHARD')",
}
"""A call that asks for what each feature brings by an option."""

QUICK = [
    "comm/test_comm.py::test_on_two_ranks_reduce_gives_the_bits_of_all_reduce",
    "oss/test_oss.py::test_trains_as_the_plain_optimizer_does_bit_for_bit[Adam]",
    "sdp/test_sharded_ddp.py::test_any_bucket_size_gives_the_same_numbers",
    "fsdp/test_fsdp.py::test_units_that_are_kept_after_forward_go_one_by_one_in_backward",
    "fsdp/test_fsdp.py::test_state_dict_is_the_plain_one_and_plain_ones_load",
    "fsdp/test_nested.py::test_units_chosen_by_hand_train_exactly_and_keep_the_models_own_names",
]
OWN = """
    comm/test_comm comm/test_order
    oss/test_as_optimizer oss/test_changes oss/test_clip interop/test_ddp_options interop/test_from_optimizer
    oss/test_granularity shards/test_layout oss/test_master oss/test_oss oss/test_oss_errors oss/test_scaler
    shards/test_shard_group state/test_shard_mark state/test_state
    sdp/test_buffers sdp/test_indexed sdp/test_lifetimes sdp/test_messages sdp/test_sdp_errors
    sdp/test_sharded_ddp sdp/test_shown_gradients sdp/test_tensors
    fsdp/test_clip_grad_norm fsdp/test_closures fsdp/test_edges fsdp/test_experts fsdp/test_fsdp fsdp/test_fsdp_errors
    checks/test_guard fsdp/test_nested state/test_optim_state fsdp/test_partition_whole
    fsdp/test_rebound fsdp/test_reentry checks/test_scaling fsdp/test_summation
"""
"""The core's own test files."""

NEED_FEATURES = [
    # Parameters that are read outside of their unit.
    "fsdp/test_edges.py::test_so_they_are_of_units_that_are_released_at_once[parameters_from_the_root]",
    # Ranks that wait in vain are told why by the watchdog, or over host memory.
    "comm/test_order.py::test_ranks_that_wait_for_one_another_in_vain_are_told_which_is_where",
    "comm/test_order.py::test_ranks_that_wait_are_told_that_another_has_failed",
    "comm/test_order.py::test_a_rank_that_never_comes_is_named_after_the_timeout",
    "sdp/test_sharded_ddp.py::test_a_rank_that_takes_another_step_raises_on_every_rank",
    "sdp/test_lifetimes.py::test_a_rank_that_trains_other_parameters_is_noticed",
    "sdp/test_buffers.py::test_buffers_of_other_sizes_on_other_ranks_are_refused_on_every_rank",
    "fsdp/test_rebound.py::test_ranks_that_go_on_are_told_why_another_does_not[evaluate]",
    "fsdp/test_reentry.py::test_a_graph_that_one_rank_alone_goes_through_again_is_refused_on_every_rank",
]
"""Tests in these files that are not the core's own."""


def without(features: Sequence[str], folder: Path, of: Path = ROOT) -> Path:
    """Copies zero/ into the folder and deletes features. Returns the folder."""
    gone = [of / "zero" / "features" / feature for feature in features]

    def ignored(where: str, names: list[str]) -> list[str]:
        return [name for name in names if (name == "__pycache__" and of == ROOT) or Path(where, name) in gone]

    shutil.copytree(of / "zero", folder / "zero", ignore=ignored)
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


CHILDREN = r"""
import gc, json, os, sys, traceback

import torch, torch._dynamo, torch.distributed.fsdp  # once for all children; autograd has not run, so that it can fork
gc.freeze()  # searches for living objects leave these out

NAMES, OPTIONS = json.loads(sys.argv[1])


def train(build):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(3)))
    trained, optimizer = build(model)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = trained(torch.linspace(-1, 1, 24).view(4, 6) + step).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def child(feature, folder):
    sys.path.insert(0, folder)
    import zero

    assert zero.__file__.startswith(folder), zero.__file__
    Adam = torch.optim.Adam
    told = f"zero/features/{feature}, which is missing"
    for name in sum(NAMES.values(), []):
        if name not in NAMES.get(feature, []):
            assert getattr(zero, name) is vars(zero)[name] and name in zero.__all__ and name in dir(zero), name
            continue
        assert not hasattr(zero, name) and name not in zero.__all__ and name not in dir(zero), name
        try:
            getattr(zero, name)
        except AttributeError as error:
            assert told in str(error) and f"zero.{name} " in str(error), error
    exec("from zero import *")
    model = torch.nn.Linear(2, 2)
    if feature in OPTIONS:
        try:
            exec(OPTIONS[feature])
        except ValueError as error:
            assert f"zero/features/{feature}" in str(error) and "missing" in str(error), error
        else:
            raise AssertionError(f"nothing was raised by {OPTIONS[feature]}")

    def sharded_gradients(model):
        optimizer = zero.OSS(model.parameters(), Adam, offload=None)
        return zero.ShardedDDP(model, optimizer), optimizer

    def sharded_parameters(model):
        wrapped = zero.FSDP(model, offload=None)
        return wrapped, Adam(wrapped.parameters())

    alone = train(lambda model: (model, Adam(model.parameters())))
    assert len(set(alone)) == 3
    assert train(lambda model: (model, zero.OSS(model.parameters(), Adam))) == alone
    assert train(sharded_gradients) == alone
    assert train(sharded_parameters) == alone
    assert zero.plan(model, world_size=2).costs


torch.set_num_threads(1)
for feature, folder in json.loads(sys.argv[2]).items():
    read, write = os.pipe()
    if not (process := os.fork()):
        verdict = "as torch alone"
        try:
            child(feature, folder)
        except BaseException:
            verdict = traceback.format_exc()
        os.write(write, verdict.encode()[-60_000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        print(json.dumps([feature, pipe.read().decode()]), flush=True)
    os.waitpid(process, 0)
"""
"""Trains without each feature in a process of its own, and prints what became of each."""


def test_each_deleted_by_itself(tmp_path):
    whole = without([], tmp_path)
    compileall.compile_dir(whole, quiet=1)  # once for all copies
    folders = {feature: str(without([feature], tmp_path / feature, of=whole)) for feature in FEATURES}
    command = [sys.executable, "-I", "-c", CHILDREN, json.dumps([NAMES, OPTIONS]), json.dumps(folders)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folders[FEATURES[0]], timeout=100)
    assert ran.returncode == 0, ran.stderr
    verdicts = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert verdicts == dict.fromkeys(FEATURES, "as torch alone"), "\n".join(verdicts.values())


def test_every_feature_is_known_by_its_names():
    """A name or an option of a feature that is renamed is missed here."""
    assert {*NAMES, *OPTIONS} <= {*FEATURES}


PLUGIN = """
import pathlib
import pytest
import zero

assert pathlib.Path(zero.__file__).is_relative_to({folder!r}), zero.__file__


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    outcome = yield
    if "needs a feature that is missing: zero/features/" in str(outcome.excinfo):
        outcome.force_exception(pytest.skip.Exception("asks for what is deleted"))
"""
"""Some of the core's tests also ask for what a feature brings, such as a sharding strategy, and are told so."""


def run_tests(folder: Path, tests: Sequence[str], timeout: float) -> None:
    """Runs test files with the copy of zero in the folder. Fails where one of them fails."""
    (folder / "asserts_the_copy.py").write_text(PLUGIN.format(folder=str(folder)))
    plugins = ("asserts_the_copy", "no:cacheprovider", "no:xdist")
    command = [sys.executable, "-m", "pytest", "-q", *(f"-p{name}" for name in plugins)]
    command += ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(ROOT)]
    command += [f"--deselect=tests/{test}" for test in NEED_FEATURES]
    command += [str(ROOT / "tests" / test) for test in tests]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=timeout)
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-2_000:]
    assert " passed" in ran.stdout


def test_all_deleted(tmp_path):
    run_tests(without(FEATURES, tmp_path), QUICK, 100)


@pytest.mark.matrix
@pytest.mark.skipif(not WHOLE, reason="make matrix runs it: it takes an hour")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("feature", [*FEATURES, "all of them"])
def test_own_tests_without(feature, tmp_path):
    tests = [f"{name}.py" for name in OWN.split()]
    run_tests(without(FEATURES if feature == "all of them" else [feature], tmp_path), tests, 3600)
