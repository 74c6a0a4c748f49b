"""What ranks do in test_memory_of_saves: they save and load by each library, and count bytes."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Adam

from inner import Meter
from launched import launched, shared_folder
from zoo import Block

WIDTH, BLOCKS = 64, 8


class MeterOfMemory(Meter):
    """Does not count what is mapped from a file: that memory can be had back at any time; nor what has none."""

    def counts(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and not mapped(tensor)


def mapped(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.untyped_storage().resizable():
        return False
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s+/\S+", line)
        if found and int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16):
            return True
    return False


class Peaks:
    """found: what calls have added, at their peak, to the bytes that are alive, by name, in multiples of the model's.
    unit: bytes of the largest unit, as such a multiple. read: names of files that were read here."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        self._weights, *units = (sum(param.nbytes for param in one.parameters()) for one in (model, *blocks))
        self.unit = max(*units, self._weights - sum(units)) / self._weights
        self.found: dict[str, float] = {}
        self.read: set[str] = set()
        self.meter = MeterOfMemory()

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.meter.reset_peak()
            before = self.meter.live()
            result = call(*args, **kwargs)
            self.found[name] = max(self.found.get(name, 0), (self.meter.peak() - before) / self._weights)
            return result

        return counted

    def count(self, of: Any, *names: str) -> None:
        """Counts methods of an object."""
        for name in names:
            setattr(of, name, self.of(name, getattr(of, name)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts, and notes what is read. Messages of several tensors, and buffers, have at most the size of a unit."""

        def noting(read: Callable[..., Any]) -> Callable[..., Any]:
            def noted(file: Any, *args: Any, **kwargs: Any) -> Any:
                self.read.add(Path(file).name if isinstance(file, str | Path) else "")
                assert str(kwargs.get("map_location", "cpu")) == "cpu"
                return read(file, *args, **kwargs)

            return noted

        readers = ("torch.load", "safetensors.torch.load_file", "zero.integrations.accelerate.states.safe_open")
        with ExitStack() as stack:
            at_once = ("comm.transport.BATCH", "fsdp.full_weights.AT_ONCE", "state.gathered.AT_ONCE")
            for name in (*at_once, "checkpoint.files.BUFFER", "checkpoint.files.CACHED"):
                stack.enter_context(mock.patch(f"zero.{name}", int(self.unit * self._weights)))
            for name in readers:
                module, _, function = name.rpartition(".")
                stack.enter_context(mock.patch(name, noting(getattr(__import__(module, fromlist=["_"]), function))))
            yield stack.enter_context(self.meter)


def nothing_stays_mapped(optimizer: Any) -> bool:
    return not any(mapped(one) for state in optimizer.state.values() for one in state.values() if one is not None)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 4 * WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def step(self, optimizer: Any, run: nn.Module, backward: Callable[[Tensor], Any]) -> None:
        backward(run(torch.ones(2, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def accelerate(rank: int, world: int, stage: int, folder: str, kind: str = "FULL") -> Peaks:
    from zero.integrations.accelerate import Accelerator, ZeroPlugin

    plain, place = Blocks(), shared_folder(folder, f"accelerate {kind} {stage}")
    peaks, plugin = Peaks(plain, [*plain.blocks]), ZeroPlugin(stage, state_dict_type=f"{kind}_STATE_DICT")
    with launched(rank, world), peaks.watching():
        accelerator = Accelerator(cpu=True, zero_plugin=plugin)
        plain = Blocks()
        model, optimizer = accelerator.prepare(plain, Adam(plain.parameters()))
        plain.step(optimizer, model, accelerator.backward)
        peaks.count(accelerator, "get_state_dict", "save_model", "save_state", "load_state")
        found = accelerator.get_state_dict(model)
        assert bool(found) == (rank == 0) and all(value.device.type == "cpu" for value in found.values())
        for each_node in (False, True):
            accelerator.project_configuration.save_on_each_node = each_node
            accelerator.save_model(model, place)
            for safe in (True, False):
                accelerator.save_state(place, safe_serialization=safe)
                accelerator.load_state(place)
        accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
        accelerator.load_state(place)  # but the weights, which the hook has loaded
        assert nothing_stays_mapped(optimizer)
    full = {"model.safetensors", "pytorch_model.bin", "optimizer.bin"}
    assert full & peaks.read == (full if rank == 0 and kind == "FULL" else set())
    return peaks


def narrow(rank: int, world: int, stage: int, folder: str) -> Peaks:
    """Accelerate, where saved weights are in 16 bits."""
    from zero.integrations.accelerate import Accelerator, ZeroPlugin

    plain, plugin = Blocks(), ZeroPlugin(stage, save_16bit_model=True, mixed_precision="bf16")
    peaks = Peaks(plain, [*plain.blocks])
    with launched(rank, world), peaks.watching():
        accelerator = Accelerator(cpu=True, zero_plugin=plugin)
        model, _ = accelerator.prepare(plain := Blocks(), Adam(plain.parameters()))
        peaks.count(accelerator, "get_state_dict", "save_model")
        accelerator.save_model(model, shared_folder(folder, f"narrow {stage}"))
    return peaks


def gpt2() -> Any:
    import transformers

    config = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 2, "n_positions": 16, "vocab_size": 61}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def adapted() -> Any:
    import peft

    return peft.get_peft_model(gpt2(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]))


def trainer(
    rank: int, world: int, stage: int, folder: str, model: Callable[[], Any] = gpt2, kind: str = "FULL"
) -> Peaks:
    from trainers import build

    from zero.integrations.accelerate import ZeroPlugin

    plain, place = model(), f"{folder}/{model.__name__} {kind} {stage}"
    peaks = Peaks(plain, [one for one in plain.modules() if type(one).__name__ == "GPT2Block"])
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    for more, checkpoint in (({}, None), ({"max_steps": 6}, f"{place}/checkpoint-2")):
        with launched(rank, world), peaks.watching():
            plugin = ZeroPlugin(stage, state_dict_type=f"{kind}_STATE_DICT")
            run = build(plugin, place, model=model, **options, **more)
            peaks.count(run, "_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler")
            peaks.count(run, "_load_best_model")
            run.train(resume_from_checkpoint=checkpoint)
    assert nothing_stays_mapped(run.optimizer)
    assert ("optimizer.pt" in peaks.read) == (rank == 0 and kind == "FULL")
    assert ("model.safetensors" in peaks.read) == (rank == 0 and model is gpt2)
    return peaks


def own(rank: int, world: int, stage: int, folder: str) -> Peaks:
    """A Trainer whose `_save` saves the module by itself."""
    import transformers
    from trainers import build

    from zero.integrations.transformers import ZeroTrainerMixin

    class Own(transformers.Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            if self.args.should_save:
                self.model.save_pretrained(output_dir)

    plain = gpt2()
    peaks = Peaks(plain, [one for one in plain.modules() if type(one).__name__ == "GPT2Block"])
    with launched(rank, world), peaks.watching():
        run = build(stage, folder, model=gpt2, kind=type("Mixed", (ZeroTrainerMixin, Own), {}))
        run.train()
        peaks.count(run, "save_model")
        run.save_model(f"{folder}/final")
    return peaks


def adapter(*given: Any) -> Peaks:
    return trainer(*given, model=adapted)


def lightning(rank: int, world: int, stage: int, folder: str, kind: str = "full") -> Peaks:
    import lightnings

    class Module(Blocks, lightnings.Module):
        def __init__(self) -> None:
            lightnings.Module.__init__(self)
            self.blocks = Blocks().blocks
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(Blocks.forward(self, x.repeat(1, WIDTH // x.shape[1])))

    peaks, path = Peaks(Module(), [*Module().blocks]), Path(shared_folder(folder, f"lightning {kind} {stage}"), "file")
    with peaks.watching():
        run = lightnings.trainer(rank, world, lightnings.strategy(stage, checkpoint=kind))
        run.fit(Module())
        peaks.count(run, "save_checkpoint")
        run.save_checkpoint(path)
        run = lightnings.trainer(rank, world, lightnings.strategy(stage, checkpoint=kind), max_epochs=2)
        peaks.count(run.strategy, "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
        run.fit(Module(), ckpt_path=path)
    assert nothing_stays_mapped(run.optimizers[0])
    return peaks


def fabric(rank: int, world: int, stage: int, folder: str, kind: str = "full") -> Peaks:
    from fabrics import fabric_at

    plain, path = Blocks(), Path(shared_folder(folder, f"fabric {kind} {stage}"), "file")
    peaks = Peaks(plain, [*plain.blocks])
    with peaks.watching():
        run, plain = fabric_at(rank, world, stage, checkpoint=kind), Blocks()
        model, optimizer = run.setup(plain, Adam(plain.parameters()))
        plain.step(optimizer, model, run.backward)
        state = {"model": model, "optimizer": optimizer, "kept": torch.ones(3)}
        peaks.count(run, "save", "load")
        run.save(path, state)
        run.load(path, state)
    assert nothing_stays_mapped(optimizer) and not mapped(state["kept"])
    return peaks


def all_of(rank: int, world: int, way: str, stage: int, folder: str) -> tuple[dict[str, float], float]:
    name, *kind = way.split()
    peaks = globals()[name](rank, world, stage, folder, **({"kind": kind[0]} if kind else {}))
    return peaks.found, peaks.unit
