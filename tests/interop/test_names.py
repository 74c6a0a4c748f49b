"""Names of PyTorch's FSDP and of FairScale that zero does not have: the error says what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import zero
from zero.interop import names

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {
    "from_fsdp": names.FSDP1 | names.FSDP2 | names.FSDP2_OPTIONS,
    "from_fairscale": names.FAIRSCALE_FSDP
    | names.FAIRSCALE_OPTIONS
    | names.FAIRSCALE_SDP
    | names.FAIRSCALE_SDP_OPTIONS
    | names.FAIRSCALE_OSS_OPTIONS,
}


def net() -> nn.Module:
    return nn.Linear(2, 2)


def oss(**options: Any) -> zero.OSS:
    module = net()
    optimizer = zero.OSS(module.parameters(), SGD, lr=0.1, **options)
    optimizer.module = module
    return optimizer


def sharded(**options: Any) -> zero.ShardedDDP:
    optimizer = oss()
    return zero.ShardedDDP(optimizer.module, optimizer, **options)


ATTRIBUTES = [
    *((zero.FSDP(net()), name) for name in names.FSDP1 | names.FSDP2 | names.FAIRSCALE_FSDP),
    *((zero.FSDP, name) for name in names.FSDP1),
    *((sharded(), name) for name in names.FAIRSCALE_SDP),
    *((oss(), name) for name in names.FAIRSCALE_SDP),
]
OPTIONS = [
    *((lambda **given: zero.FSDP(net(), **given), name) for name in names.FSDP2_OPTIONS | names.FAIRSCALE_OPTIONS),
    *((sharded, name) for name in names.FAIRSCALE_SDP_OPTIONS),
    *((oss, name) for name in names.FAIRSCALE_OSS_OPTIONS),
]


def text_of(name: str) -> str:
    return next(table[name] for table in TABLES.values() if name in table)


def test_an_attribute_that_is_not_there_is_told_by_our_name():
    for owner, name in ATTRIBUTES:
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError) as refused:
            getattr(owner, name)
        assert name in str(refused.value) and str(refused.value).endswith(f"Instead: {text_of(name)}.")


def test_so_is_an_option():
    for build, name in OPTIONS:
        with pytest.raises((TypeError, ValueError)) as refused:
            build(**{name: True})
        assert f"{name!r}. Instead: {text_of(name)}." in str(refused.value)


def test_what_the_users_module_has_by_such_a_name_is_found():
    module = net()
    module.unshard = "its own"
    assert zero.FSDP(module).unshard == "its own"
    with pytest.raises(AttributeError, match=r"'Linear' object has no attribute 'weights'$"):
        zero.FSDP(net()).weights  # noqa: B018


def test_the_process_group_may_be_given_by_its_position():
    assert zero.FSDP(net(), None)(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("page", TABLES)
def test_the_pages_say_the_same(page):
    rows = [f"| `{name}` | {text} |" for name, text in TABLES[page].items()]
    assert "\n".join(["| name | instead |", "|---|---|", *rows]) in (DOCS / f"{page}.md").read_text()
