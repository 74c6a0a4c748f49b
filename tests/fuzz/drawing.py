"""How hypothesis draws cases. The first of each choice is the simplest: what shrinking comes to."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from fuzz.cases import Case, Micro, Node, Step
from fuzz.layers import AROUND, LAYERS
from fuzz.loop import EVENTS, WRITES
from fuzz.training import OPTIMIZERS, POLICIES, PREFETCH, WHOLE, kinds

SIZES = st.integers(1, 7)
often_false = st.sampled_from([False, False, False, True])

layers = st.builds(
    Node, kind=st.sampled_from([*LAYERS]), size=SIZES, frozen=often_false, of=st.integers(0, 2), inside=st.just(())
)


def around(inside: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    nodes = st.lists(inside, min_size=1, max_size=3).map(tuple)
    return st.builds(Node, kind=st.sampled_from([*AROUND]), frozen=st.just(False), inside=nodes, size=st.just(3))


nodes = st.recursive(layers, around, max_leaves=6)

BY = ["optimizer", "model", "each"]
CLEARS = [*BY, *(f"{whom} to zero" for whom in BY), "head", "head to zero"]


def micros(retained: bool) -> st.SearchStrategy[Micro]:
    forwards, again = st.sampled_from([1, 1, 2]), often_false if retained else st.just(False)
    return st.builds(
        Micro, forwards=forwards, sync=st.booleans(), retained=again, cleared=st.sampled_from([*[""] * 8, *CLEARS])
    )


@st.composite
def steps(draw: Any, retained: bool) -> Step:
    one = micros(retained)
    return Step(
        micros=(*draw(st.lists(one, max_size=2)), replace(draw(one), sync=True)),
        before=draw(st.sampled_from([*EVENTS])),
        clear=draw(st.sampled_from([*BY, *CLEARS])),
        clip=draw(st.sampled_from([None, None, None, 0.1, 100.0])),
        after=draw(st.sampled_from(["", "", *WRITES])),
    )


@st.composite
def cases(draw: Any) -> list[Case]:
    """The same training at stages 3, 2 and 1, each with options of its own."""
    world = draw(st.sampled_from([2, 1, 2, 3, 2, 4]))
    body = tuple(draw(st.lists(nodes, min_size=1, max_size=4)))
    retained = not kinds(body) & {"checkpointed", "each checkpointed", "reentrant"}
    optim = draw(st.sampled_from([*OPTIMIZERS]))
    if optim == "adafactor" and kinds(body) & {"tiny", "half", "double"}:
        # torch's Adafactor divides by the number of elements, and takes the first parameter's epsilon for all dtypes.
        optim = "lamb"
    common: dict[str, Any] = {
        "body": body,
        "world": world,
        "optim": optim,
        "steps": tuple(draw(st.lists(steps(retained), min_size=2, max_size=3))),
        "width": draw(st.integers(1, 7)),
        "rows": draw(st.integers(2, 4)),
        "groups": draw(st.sampled_from([1, 1, 2, 3])),
        "compared": draw(st.booleans()),
        "broadcast_buffers": draw(st.booleans()),
        "partition": "whole" if optim in WHOLE else draw(st.sampled_from(["auto", "even", "whole"])),
    }
    own = {3: _stage_3, 2: _stage_2, 1: _stage_1}
    return [Case(stage=stage, **common, **options(draw, common)) for stage, options in own.items()]


def _stage_1(draw: Any, common: dict[str, Any]) -> dict[str, Any]:
    by_ddp = draw(st.booleans())
    by_ddp &= not kinds(common["body"]) & {"reentrant", "twice"}
    by_ddp &= all(step.before not in ("freeze", "unfreeze", "forward alone") for step in common["steps"])
    micros = [micro for step in common["steps"] for micro in step.micros]
    by_ddp &= all(micro.forwards == 1 for micro in micros)
    by_ddp &= not any(micro.retained and micro.sync for micro in micros)  # it averages one backward a forward
    return {"averaged": "ddp" if by_ddp else "hand"}


def _stage_2(draw: Any, common: dict[str, Any]) -> dict[str, Any]:
    return {"bucket": draw(st.sampled_from([None, 0, 20, 50]))}


def _stage_3(draw: Any, common: dict[str, Any]) -> dict[str, Any]:
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    if common["world"] in (2, 4):
        strategies += ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
    units = draw(st.sampled_from([*POLICIES]))
    return {
        "units": units,
        "by_hand": draw(often_false)
        and units != "size",  # which counts the part of a parameter that is sharded already
        "strategy": draw(st.sampled_from(strategies)),
        "replicas": 2,
        "prefetch": draw(st.sampled_from([*PREFETCH])),
    }
