"""Values other than the model's tensors, to JSON and back: options, step counts, the user's `extra`.

JSON's own values are stored as they are. Anything else is an object with the member "$", which names its type:

    {"$": "tuple", "items": [...]}
    {"$": "complex", "items": [real, imaginary]}
    {"$": "dict" or "Counter", "items": [[key, value], ...]}            with keys that are no strings, or "$" among them
    {"$": "tensor" or "array", "dtype": "F32", "shape": [...], "value": number or "base64": bytes}

What a resumed run needs besides its model and optimizer is in entries of `extra`, too:

    resume/0/StepLR    of an object of the argument `resume`, by its position and class
    resume/random      Python's generator; the others are resume/numpy, resume/torch, and by the device's name
"""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.checkpoint.format import DTYPES, NAMES, refuse_unstorable

RESUMED = "resume/"
"""Begins the names of such entries of `extra`."""

# numpy's names for the dtypes that a checkpoint can hold.
_ARRAYS = {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}

_TAG = "$"

_MOST_BITS = 1 << 13  # of an integer: Python does not convert those of more than some thousand digits to text


def encode(value: Any, where: str) -> Any:
    """A value as JSON. where: its name in errors. Raises ValueError for anything but the above, and numpy's numbers,
    which are stored as Python's."""
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"{where} is an integer of {value.bit_length()} bits. Save at most {_MOST_BITS}.")
    for plain in (int, float):  # also of subclasses
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, str):
        return str.__str__(value)  # an enum's member becomes its value
    if isinstance(value, complex):
        return {_TAG: "complex", "items": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    if isinstance(value, Mapping):
        if not isinstance(value, Counter) and _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        items = [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "Counter" if isinstance(value, Counter) else "dict", "items": items}
    if isinstance(value, np.ndarray) and value.dtype.name in _ARRAYS and not isinstance(value, np.ma.MaskedArray):
        return {
            **encode(torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), ndmin=1)), where),
            "shape": list(value.shape),
            _TAG: "array",
        }
    if isinstance(value, Tensor):
        refuse_unstorable(where, value)
        encoded = {_TAG: "tensor", "dtype": NAMES[value.dtype], "shape": list(value.shape)}
        if value.dim() == 0 and not value.dtype.is_complex and value.dtype.itemsize != 1:
            return {**encoded, "value": value.item()}
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return {**encoded, "base64": base64.b64encode(flat.numpy().tobytes()).decode()}
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold. Save numbers, "
        "strings, lists, tuples, dictionaries and plain tensors of them, such as a state_dict()."
    )


def decode(encoded: Any) -> Any:
    """The value that `encode` was called with."""
    if isinstance(encoded, list):
        return [decode(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in encoded.items()}
    if kind == "tuple":
        return tuple(decode(item) for item in encoded["items"])
    if kind == "complex":
        return complex(*encoded["items"])
    if kind in ("dict", "Counter"):
        items = {decode(key): decode(item) for key, item in encoded["items"]}
        return Counter(items) if kind == "Counter" else items
    if kind == "array":
        return decode({**encoded, _TAG: "tensor"}).numpy()
    dtype = DTYPES[encoded["dtype"]]
    if "value" in encoded:
        return torch.tensor(encoded["value"], dtype=dtype, device="cpu")
    data = bytearray(base64.b64decode(encoded["base64"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.view(encoded["shape"])


def label(name: str) -> str:
    """What an entry of `extra` is called in messages."""
    return name if name.startswith(RESUMED) else f"extra[{name!r}]"


def resumed(resume: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to get and how to set each state of a resumed run, by the name of the entry of `extra`; nothing if `resume`
    is None. Raises ValueError for an object that has no state to save."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
    if resume is None:
        return found
    for number, one in enumerate(resume if isinstance(resume, list | tuple) else [resume]):
        name = f"{RESUMED}{number}/{type(one).__name__}"
        if isinstance(one, torch.Generator):
            found[name] = one.get_state, one.set_state
            continue
        has_state = callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
        if isinstance(one, nn.Module | Optimizer) or not has_state:
            raise ValueError(
                f"resume[{number}] is a {type(one).__name__}. Pass objects with state_dict() and load_state_dict(), as "
                "schedulers and GradScalers have, and torch.Generators; model and optimizer have arguments of their "
                "own, and anything else belongs into extra"
            )
        found[name] = one.state_dict, one.load_state_dict
    # The generators last, because setting others may draw.
    found[f"{RESUMED}random"] = random.getstate, random.setstate
    found[f"{RESUMED}numpy"] = np.random.get_state, np.random.set_state
    found[f"{RESUMED}torch"] = torch.get_rng_state, torch.set_rng_state
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        module = torch.get_device_module(device)
        found[f"{RESUMED}{device.type}"] = module.get_rng_state, module.set_rng_state
    return found
