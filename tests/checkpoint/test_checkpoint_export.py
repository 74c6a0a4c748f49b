"""What an export keeps, what it says that it leaves out, and what the command line tells."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from saved import Counting, differences, tiny
from torch import nn

import zero
from zero.checkpoint.__main__ import main
from zero.checkpoint.export import export, export_dcp
from zero.checkpoint.importing import import_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture
def run(tmp_path):
    """A run, its model and its optimizer."""
    model = tiny()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.99))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    zero.checkpoint.save(tmp_path / "run", model, optimizer)
    return tmp_path / "run", model, optimizer


def kept(path):
    """The tensors of a torch distributed checkpoint, by the names of its metadata."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    told = {
        key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in metadata.items() if hasattr(one, "size")
    }
    dcp.load(told, checkpoint_id=path, no_dist=True)
    return told


# ------------------------------------------------------------------------------------ torch's distributed checkpoint


def test_dcp_takes_a_dtype(run, tmp_path):
    path, model, optimizer = run
    assert main(["export", str(path), str(tmp_path / "dcp"), "--to", "dcp", "--dtype", "bf16"]) == 0
    found = kept(tmp_path / "dcp")
    for name, param in model.named_parameters():
        assert torch.equal(found[f"model.{name}"], param.bfloat16()) and found[f"model.{name}"].dtype == torch.bfloat16
        assert torch.equal(found[f"optim.state.{name}.exp_avg"], optimizer.state[param]["exp_avg"])


def test_dcp_leaves_what_is_there(run, tmp_path, capsys):
    path, _, _ = run
    export_dcp(path, tmp_path / "dcp")
    before = {one.name: one.stat().st_mtime_ns for one in (tmp_path / "dcp").iterdir()}
    assert main(["export", str(path), str(tmp_path / "dcp"), "--to", "dcp"]) == 1
    assert "has .metadata already. Choose another directory" in capsys.readouterr().err
    assert {one.name: one.stat().st_mtime_ns for one in (tmp_path / "dcp").iterdir()} == before


def test_dcp_makes_the_directories_around_it(run, tmp_path):
    path, model, _ = run
    assert main(["export", str(path), str(tmp_path / "some" / "where"), "--to", "dcp"]) == 0
    assert sorted(one.name for one in (tmp_path / "some" / "where").iterdir()) == [".metadata", "__0_0.distcp"]
    assert torch.equal(kept(tmp_path / "some" / "where")["model.0.weight"], model[0].weight)


def test_dcp_of_nothing_makes_nothing(tmp_path):
    with pytest.raises(ValueError, match="is not there"):
        export_dcp(tmp_path / "none", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_dcp_refuses_what_it_would_ignore(run, tmp_path, capsys):
    path, _, _ = run
    assert main(["export", str(path), str(tmp_path / "dcp"), "--to", "dcp", "--max-shard-size", "1GB"]) == 1
    assert "--max-shard-size is for Hugging Face's files" in capsys.readouterr().err
    assert not (tmp_path / "dcp").exists()


# --------------------------------------------------------------------------------------------------- extra state


@pytest.mark.parametrize("shard", [10**9, 1])
def test_extra_state_that_is_a_tensor_is_exported(shard, tmp_path):
    model, other = nn.Sequential(Counting(torch.arange(6.0).view(2, 3))), nn.Sequential(Counting())
    zero.checkpoint.save(tmp_path / "run", model)
    export(tmp_path / "run", tmp_path / "out", max_shard_size=shard, dtype=torch.bfloat16)
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    other.load_state_dict(found, strict=True)
    assert torch.equal(other[0].seen, model[0].seen) and other[0].seen.dtype == torch.float32

    import_checkpoint(tmp_path / "out", tmp_path / "again")
    again = nn.Sequential(Counting())
    zero.checkpoint.load(tmp_path / "again", again)
    assert torch.equal(again[0].seen, model[0].seen)


def test_extra_state_that_is_no_tensor_is_named(tmp_path):
    zero.checkpoint.save(tmp_path / "run", nn.Sequential(Counting({"steps": 3}), Counting(torch.ones(2))))
    with pytest.warns(UserWarning, match=r"and 0\._extra_state of .* is none: left out.*strict=False.*--to dcp"):
        export(tmp_path / "run", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "1._extra_state" in found and "0._extra_state" not in found
    assert nn.Sequential(Counting(), Counting()).load_state_dict(found, strict=False).missing_keys == ["0._extra_state"]


@pytest.mark.parametrize("seen", [torch.arange(3.0), {"steps": 3}])
def test_dcp_has_extra_state(seen, tmp_path):
    model, other = nn.Sequential(Counting(seen)), nn.Sequential(Counting())
    zero.checkpoint.save(tmp_path / "run", model)
    export_dcp(tmp_path / "run", tmp_path / "dcp")
    other[0].seen = torch.zeros(3) if isinstance(seen, torch.Tensor) else {"steps": 0}
    told = {"model": other.state_dict()}
    dcp.load(told, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(told["model"], strict=True)
    assert not differences(dict(model.named_parameters()), dict(other.named_parameters()))
    assert torch.equal(other[0].seen, seen) if isinstance(seen, torch.Tensor) else other[0].seen == seen


# ------------------------------------------------------------------------------------------------- the command line


def test_inspect_prints_options_as_they_were(run, capsys):
    path, _, _ = run
    assert main(["inspect", str(path)]) == 0
    assert "betas=(0.8, 0.99), eps=1e-08" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["inspect"], ["export", "out"], ["import", "weights.pt"]])
def test_a_url_without_its_driver_is_told_in_a_line(command, tmp_path, capsys):
    torch.save(tiny().state_dict(), tmp_path / "weights.pt")
    verb, *other = command
    paths = ["s3://bucket/run", *(str(tmp_path / one) for one in other)]
    assert main([verb, *(reversed(paths) if verb == "import" else paths)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"{verb}: ") and "s3fs" in message and message.count("\n") == 1
