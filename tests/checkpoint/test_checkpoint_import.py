"""What is imported arrives under the right names, or not at all."""

from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from saved import Counting, adam, assert_loads, differences, with_adam
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import zero
from models import take_step
from zero.checkpoint.__main__ import main
from zero.checkpoint.export import export
from zero.checkpoint.importing import import_checkpoint


def net(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def train(model, optimizer, count=2):
    width = next(model.parameters()).shape[1]
    for step in range(count):
        take_step(
            optimizer, model(torch.randn(6, width, generator=torch.Generator().manual_seed(step))).square().mean()
        )


def imported(told, tmp_path, kind="torch.save"):
    source = tmp_path / "source"
    torch.save(told, source) if kind == "torch.save" else dcp.save(told, checkpoint_id=source)
    import_checkpoint(source, tmp_path / "run")
    return tmp_path / "run"


class AppState(Stateful):
    """Of PyTorch's tutorial of distributed checkpoints."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_the_layout_of_the_tutorial_of_pytorch(tmp_path):
    model, optimizer = with_adam(net(4, 4, 4))
    train(model, optimizer)
    run = imported({"app": AppState(model, optimizer), "epoch": 3}, tmp_path, "distributed")
    other = with_adam(net(4, 4, 4))
    assert zero.checkpoint.load(run, *other) == {"epoch": 3}
    assert_loads(run, (model, optimizer), other)


def test_a_dictionary_of_two_models_is_refused(tmp_path):
    weights = {"model": net(4, 4).state_dict()}
    with pytest.raises(ValueError, match="'student', which is no name of a tensor"):
        imported({"student": weights, "teacher": weights}, tmp_path)


# ------------------------------------------------------------------------------------------ parameters of an optimizer


class Wrapper(nn.Module):
    """Names its module's parameters as DistributedDataParallel and torch.compile do."""

    def __init__(self, attribute, module):
        super().__init__()
        self.attribute = attribute
        self.add_module(attribute, module)

    def forward(self, inputs):
        return getattr(self, self.attribute)(inputs)


@pytest.mark.parametrize("weights_of", ["the wrapper", "the module"])
@pytest.mark.parametrize("attributes", [["module"], ["_orig_mod"], ["module", "_orig_mod"]])
def test_names_of_an_optimizer_lose_the_wrapper(attributes, weights_of, tmp_path):
    model = wrapped = net(4, 4, 4)
    for attribute in reversed(attributes):
        wrapped = Wrapper(attribute, wrapped)
    optimizer = adam()(wrapped.named_parameters())
    train(model, optimizer)
    saved = wrapped if weights_of == "the wrapper" else model
    run = imported({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert_loads(run, (model, optimizer), with_adam(net(4, 4, 4)))


def test_a_wrapped_parameter_of_two_names(tmp_path):
    """The optimizer may know it by the one that the weights do not store it under."""
    model = net(4, 4, 4)
    model[1].weight = model[0].weight
    names = ["module.1.weight", "module.0.bias", "module.1.bias"]
    optimizer = adam()((name, model.get_parameter(name.removeprefix("module."))) for name in names)
    train(model, optimizer)
    run = imported({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other = net(4, 4, 4)
    other[1].weight = other[0].weight
    assert_loads(run, (model, optimizer), with_adam(other))


def test_numbers_that_shapes_do_not_settle_are_told(tmp_path):
    model = net(4, 4, 4)
    optimizer = adam()([*model[1].parameters(), *model[0].parameters()])
    train(model, optimizer)
    with pytest.warns(UserWarning, match=r"built from model\.parameters\(\), in the model's order.*named_parameters"):
        imported({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)


def test_the_remedy_for_numbers(tmp_path):
    """Names can be given to a state that was saved without."""
    model = net(4, 4, 4)
    optimizer = adam()([*model[1].parameters(), *model[0].parameters()])
    train(model, optimizer)
    pairs = list(model.named_parameters())
    named = adam()([*pairs[2:], *pairs[:2]])
    named.load_state_dict(optimizer.state_dict())
    run = imported({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path)
    assert_loads(run, (model, optimizer), with_adam(net(4, 4, 4)))


def test_numbers_that_shapes_contradict_are_refused(tmp_path):
    model = net(4, 3, 2)
    optimizer = adam()([*model[1].parameters(), *model[0].parameters()])
    train(model, optimizer)
    with pytest.raises(ValueError, match="cannot be matched"):
        imported({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["torch.save", "distributed"])
@pytest.mark.parametrize("optim", [adam(), torch.optim.SGD])
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_numbers_that_cannot_be_mistaken_pass_without_a_word(kind, optim, tmp_path):
    """Because all shapes differ, or nothing is kept by parameter."""
    model = net(4, 3, 2)
    optimizer = optim(model.parameters())
    train(model, optimizer)
    run = imported({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path, kind)
    other = net(4, 3, 2)
    assert_loads(run, (model, optimizer), (other, optim(other.parameters())))


# ------------------------------------------------------------------------------------------------- what is no such file


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"model": {"a": torch.ones(2)}, "optimizer": {"lr": 1}}, "not what an optimizer's state_dict"),
        ({"model": {"a": torch.ones(2)}, "optimizer": {"param_groups": [{"lr": 1}]}}, "Expected 'param_groups', each"),
        (
            {"model": {"a": torch.ones(2)}, "optimizer": {"param_groups": [{"params": [0]}], "state": {3: {}}}},
            "'state' of these",
        ),
        ({1: torch.ones(2)}, "holds 1, which is no name of a tensor"),
        ({"model": {"a": torch.ones(2).to_sparse()}}, r"model/a has layout torch\.sparse_coo"),
        (
            {
                "model": {"a": torch.ones(2)},
                "optimizer": {
                    "param_groups": [{"params": ["a"]}],
                    "state": {"a": {"master": torch.ones(2).to_sparse()}},
                },
            },
            r"master/a has layout torch\.sparse_coo",
        ),
    ],
)
def test_what_cannot_be_imported_is_told_in_a_line(told, expected, tmp_path, capsys):
    torch.save(told, tmp_path / "source")
    assert main(["import", str(tmp_path / "source"), str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("import: ") and message.count("\n") == 1
    with pytest.raises(ValueError, match=expected):
        import_checkpoint(tmp_path / "source", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def shards(tmp_path):
    zero.checkpoint.save(tmp_path / "saved", net(4, 4, 4))
    return export(tmp_path / "saved", tmp_path / "out", max_shard_size=100)


@pytest.mark.parametrize("lost", ["file", "tensor"])
def test_shards_that_are_not_all_there(lost, tmp_path):
    first, *_ = shards(tmp_path)
    first.unlink()
    if lost == "tensor":
        save_file({"0.bias": torch.zeros(4)}, first)
    expected = "is not there" if lost == "file" else "has no '0.weight'"
    with pytest.raises(ValueError, match=rf"{first} {expected}, but model\.safetensors\.index\.json names it"):
        import_checkpoint(tmp_path / "out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 1}', "{}"])
def test_an_index_of_shards_that_is_none(text, tmp_path):
    *_, index = shards(tmp_path)
    index.write_text(text)
    with pytest.raises(ValueError, match=f"{index} is no index"):
        import_checkpoint(tmp_path / "out", tmp_path / "run")


# ------------------------------------------------------------------------------------------------------ extra state


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("torch.save", torch.arange(3.0)),
        ("torch.save", {"steps": 3, "mean": torch.ones(2)}),
        ("distributed", torch.arange(3.0)),
        ("distributed", {"steps": 3, "mean": torch.ones(2)}),
        ("safetensors", torch.arange(3.0)),  # which hold tensors only
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_import_of_extra_state(kind, seen, tmp_path):
    model, other = nn.Sequential(Counting(seen)), nn.Sequential(Counting())
    if kind == "safetensors":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        import_checkpoint(tmp_path / "model.safetensors", tmp_path / "run")
    else:
        imported({"model": {f"module.{name}": value for name, value in model.state_dict().items()}}, tmp_path, kind)
    zero.checkpoint.load(tmp_path / "run", other)
    assert not differences(dict(model[0].named_parameters()), dict(other[0].named_parameters()))
    if isinstance(seen, dict):
        assert other[0].seen["steps"] == 3 and torch.equal(other[0].seen["mean"], seen["mean"])
    else:
        assert torch.equal(other[0].seen, seen)
