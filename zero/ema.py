"""An average of the weights at every stage, in shards where the optimizer's state is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_not
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from zero._torch.modules import parameters_of
from zero._torch.tensors import as_plain_tensors
from zero.comm.together import Together
from zero.fsdp.unit import refuse_busy
from zero.measure.param_groups import SHARD_MARK
from zero.shards.sharded_parameter import mark_states
from zero.state.optimizer_state import OWN, load, shard_of
from zero.state.stepped import SteppedShards
from zero.tensor_parallel import parts
from zero.wrappers import comms_of, holders_of, unwrapped


class EMA(Optimizer):
    """The exponential moving average of a model's weights. At stages 1 to 3 a rank keeps its shards of it.

        ema = zero.EMA(model, decay=0.999)  # on every rank, after zero.setup
        ema.update()  # after each step
        with ema.swapped():  # the weights are the averages in here
            evaluate(model)
        zero.checkpoint.save("run", model, [optimizer, ema])

    The averages are, to the last bit, those of torch's AveragedModel with get_ema_multi_avg_fn(decay), of the masters
    where there are any. What was frozen, or not there yet, when it was built has no average, and buffers stay the
    model's. It is an optimizer that steps nothing, whose state is the averages: what saves, loads or counts state of
    optimizers takes it.

    model: what zero.setup or a wrapper returned, or a module that contains wrapped or plain ones.
    decay: a number from 0 up to 1, but not 1; an option of the group, as a rate is, that loading brings back.

    Raises ValueError for another decay, and for a model without trained parameters.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        inner, wrappers = unwrapped(model)
        if not isinstance(decay, int | float) or isinstance(decay, bool) or not 0 <= decay < 1:
            raise ValueError(f"zero.EMA(decay={decay!r}): pass a number from 0 up to 1, but not 1, such as 0.999.")
        found = holders_of(parts.of(param) for param in parameters_of(inner) if param.requires_grad)
        self._models, self._sharding, self._parts = found
        if not self._parts:
            raise ValueError(f"zero.EMA: nothing in the {type(inner).__name__} is trained. Pass the trained model.")
        groups = [one.index.groups for one in self._models] + [one.shards.shard_groups for one in self._sharding]
        self._groups = [group for of_one in groups for group in of_one]
        comms = [one.comms for one in self._models] + [[one.comm] for one in self._sharding]
        self._comms = comms[0] if comms and not wrappers else comms_of(wrappers)
        self._together, self._is_swapped = Together(self._comms, "zero.EMA.swapped()"), False
        super().__init__(self._parts.values(), {"decay": decay})

    def _begin(self, call: str) -> None:
        """Raises RuntimeError where averages and weights do not belong together now."""
        if self._is_swapped:
            raise RuntimeError(f"{call}: within swapped() weights and averages are exchanged. Do it after the with.")
        *now, stepped = holders_of(self._parts)
        if now != [self._models, self._sharding] or any(map(is_not, stepped.values(), self._parts.values())):
            raise RuntimeError(f"{call}: its model was wrapped or unwrapped since. Build another zero.EMA after that.")
        for model in self._models:
            refuse_busy(model.units, call)
        for one in self._sharding:
            one.refuse_changes()

    def update(self) -> None:
        """Takes the weights into the averages; the first time, copies them. Call it after each step, on every rank: it
        sends nothing, so nobody notices a rank that leaves it out. Raises RuntimeError in `swapped`, in forward and
        backward, and if the model was wrapped or unwrapped since this was built."""
        self._begin("zero.EMA.update()")
        self._visit(exchange=False)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Collective. In this context the weights are the averages, which keep what is written into them. What one rank
        raises inside is raised on all, once they come to its end. Raises as `update` does, on every rank."""
        with self._together as together:
            self._begin("zero.EMA.swapped()")
            together.agree()
        in_step = True
        self._visit(exchange=True)
        try:
            with self._together as together:
                yield
                together.agree()
        except BaseException as error:
            # Other ranks do not hear of Ctrl-C, and out of step they gather nothing.
            in_step = isinstance(error, Exception) and not any(comm.log.failure.broken for comm in self._comms)
            raise
        finally:
            self._visit(exchange=True, gathers=in_step)

    @torch.inference_mode(False)  # averages that are made within it could never be written again
    @torch.no_grad()
    def _visit(self, *, exchange: bool, gathers: bool = True) -> None:
        """Takes this rank's weights into their averages; or, collectively with `gathers`, exchanges both."""
        for unit in (unit for model in self._models for unit in model.units):
            unit.reshard()  # a forward without backward may have left it unsharded
        for one in self._sharding:
            if one.shards.written_between_steps() is None:  # else the next step refuses what was written
                one.shards.refresh()
                one.shards.note_versions()
        with as_plain_tensors():
            for group in self._groups:
                if exchange or group.offload.active:
                    group.synchronize()
            for part, state in [(part, self.state[part]) for part in self._parts.values()]:
                if "average" not in state:
                    state.update({} if exchange else {"average": part.detach().clone()})
                elif exchange:
                    weights = part.detach().clone()
                    part.copy_(state["average"])
                    state["average"].copy_(weights)
                else:
                    state["average"].lerp_(part, 1 - self.param_groups[0]["decay"])
            for group in self._groups:
                group.offload.after_step(self, [self._parts[one] for one in group.params if one in self._parts])
        mark_states(self)
        self._is_swapped ^= exchange
        for one in self._sharding if exchange else ():
            one.gather_written(self._parts.keys()) if gathers else one.shards.write_back()

    @property
    def stepped_shards(self) -> SteppedShards:
        """The averages, for what saves and loads the state of optimizers."""
        self._begin("the saving or loading of a zero.EMA")
        groups = [{**group, "params": [*self._parts]} for group in self.param_groups]
        comm = self._groups[0].comm if self._groups else self._comms[0]  # an OSS may shard over fewer ranks than train
        return SteppedShards(self, self._groups, comm, groups, part=self._parts.__getitem__)

    def state_dict(self) -> dict[str, Any]:
        """The averages; at stages 1 to 3 this rank's shards, which load on this rank alone."""
        return shard_of(self.stepped_shards)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads full averages or this rank's shards. Raises ValueError if they do not fit."""
        if "n_averaged" in state_dict:
            raise ValueError(
                "this is the state of an AveragedModel. Load it into the model by zero.load_full_state_dict(model, "
                "state), call update(), which copies it the first time, and load the weights afterwards."
            )
        is_own = state_dict.get(SHARD_MARK) == OWN
        super().load_state_dict(state_dict) if is_own else load(self.stepped_shards, state_dict)

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError, as `zero_grad` does: it steps nothing."""
        raise RuntimeError("a zero.EMA steps nothing, and has no gradients. Call its update() after each step.")

    step.hooked = True  # type: ignore[attr-defined]  # else torch's constructor has hooks called around it
    zero_grad = step
