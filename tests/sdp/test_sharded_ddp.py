"""ShardedDDP: where gradients are and what of them is shown, what is sent, and what a user sees of the module.

That it trains right in all kinds of loops is in tests/parity.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpus
import ranks
from assertions import same
from rows import Rows
from runs import sgd, stage_2
from zoo import data

WIDTH = 9


class Net(nn.Module):
    """Layers, of which a forward may skip some; `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.spare = nn.Linear(WIDTH, 2)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("shift", torch.arange(float(WIDTH)))

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:
        x = self.frozen(x) + self.shift
        for number, layer in enumerate(self.layers):
            x = x if number in skip else torch.tanh(layer(x))
        return x


def batch(rank: int, step: int = 0) -> Tensor:
    return data(3, WIDTH, rank=rank, step=step)


@pytest.mark.parametrize("bucket", [None, 0], ids=["one bucket", "each alone"])
@ranks.on(2)
def test_what_no_rank_used_has_no_gradient_and_does_not_decay(rank, world, bucket):
    """What any rank used shows a gradient on every rank, with the parameter's name."""
    model, optimizer = stage_2(Net(), sgd, bucket=bucket)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    skip = (1,) if rank else (1, 2)  # layer 1 by nobody, layer 2 by some
    model(batch(rank), skip=skip).square().mean().backward()
    for name, param in model.named_parameters():
        used = not name.startswith(("layers.1.", "spare.", "frozen."))
        assert (param.grad is not None) == used, name
        assert (optimizer.part(param).grad is not None) == used, name
        if used:
            shown = param.grad
            assert (shown.shape, shown.dtype, shown.device) == (param.shape, param.dtype, param.device)
            assert not shown.is_sparse and name in repr(shown)
    shards = [optimizer.part(param) for param in model.parameters() if param.requires_grad]
    optimizer.step()
    assert all(shard.grad is None for shard in shards)
    changed = {name for name, value in model.module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"layers.{number}.{kind}" for number in (0, 2, 3) for kind in ("weight", "bias")}


def reads(read: Any) -> Any:
    """read(parameters, optimizer) between backward and step."""
    return lambda t, i: t.update(t.loss(i), lambda t: read([*t.n.parameters()], t.o))


def unscale(_: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler(gpus.DEVICE)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def noted(read: Any) -> Any:
    """read(a gradient) of each parameter, compared with stage 0's."""
    return lambda t, i: t.update(t.loss(i), lambda t: [t.note(read(p.grad)) for p in t.n.parameters()])


row = Rows("what is computed with a gradient that is sharded", __name__, same={2})
row.of("a norm of data", noted(lambda grad: grad.data.abs().max()))
row.of("an array", noted(lambda grad: torch.tensor(grad.detach().cpu().numpy())))
row.of("a list", noted(lambda grad: torch.tensor(grad.tolist())))
row.of("torch's scaler", reads(unscale))
row.of("a plain optimizer", reads(lambda params, _: torch.optim.SGD(params, lr=0.1).step()))
test_rows = row.tests()


@ranks.raises(2, TypeError, r"the gradient of '0\.weight' is spread over the ranks, and cannot be pickled")
def test_a_file_of_gradients_is_refused_on_every_rank(rank, world):
    model, _ = stage_2(nn.Sequential(nn.Linear(4, 3)), sgd)
    model(torch.ones(2, 4)).sum().backward()
    torch.save([param.grad for param in model.parameters()], io.BytesIO())


@ranks.on(2)
def test_the_module_its_names_and_its_weights_are_the_plain_ones(rank, world):
    net = Net()
    before, expected = [*net.parameters()], copy.deepcopy(net.state_dict())
    model, _ = stage_2(net, sgd)
    assert model.module is net and model.layers is net.layers and model.shift is net.shift
    assert all(one is other for one, other in zip(before, net.parameters(), strict=True))
    same(dict(model.state_dict()), dict(expected))
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such  # noqa: B018

    other = {name: torch.full_like(value, 0.1) for name, value in expected.items()}
    assert str(model.load_state_dict(other)) == "<All keys matched successfully>"
    with pytest.raises(RuntimeError, match=r"Missing key.*shift"):
        model.load_state_dict({name: value for name, value in other.items() if name != "shift"})
    with pytest.raises(ValueError, match="assign=False"):
        model.load_state_dict(other, assign=True)
    plain = Net()
    plain.load_state_dict(other)
    assert torch.equal(model(batch(rank)), plain(batch(rank)))
    assert not model.eval().module.training and model.train().module.training
