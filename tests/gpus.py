"""The suite on the GPUs of this machine: `make gpu` sets ZERO_TEST_DEVICE=cuda. Without it nothing here has an effect.

Tensors are then made on a GPU unless a test names a device, in rank processes and in the tests' own, and ranks send by
NCCL what is on a GPU. Ranks that outnumber the GPUs share them. NCCL refuses two ranks of one host on one GPU, so they
pose as hosts of their own, and send by sockets.
"""

import os

import pytest
import torch

DEVICE = os.environ.get("ZERO_TEST_DEVICE") or "cpu"
ON = DEVICE == "cuda"
BACKEND = "cpu:gloo,cuda:nccl" if ON else "gloo"

PATIENCE = 3 if ON else 1
"""Times as long as on the CPU: the first use of a GPU, and of NCCL, takes a process seconds."""

ROUNDING = 1e-5 if ON else 0.0
"""Of norms: a GPU's sum depends on how a tensor lies."""

if ON:  # Modules that the fork server imports may ask for GPUs; the driver's answer would leave none to its forks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def problem() -> str | None:
    """Why these tests cannot run, or None."""
    if DEVICE not in ("cpu", "cuda"):
        return f"ZERO_TEST_DEVICE={DEVICE!r} in the environment: choose cpu or cuda, or leave it out."
    if ON and not torch.cuda.is_available():
        return f"ZERO_TEST_DEVICE=cuda in the environment, but torch {torch.__version__} finds no GPU on this machine."
    return None


def cpu_only(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(ON, reason=f"on the CPU only: {reason}")


def gpu_only(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not ON, reason=f"on GPUs only, by `make gpu`: {reason}")


def shared(world: int) -> bool:
    """Whether so many ranks have to share GPUs."""
    return ON and world > torch.cuda.device_count()


def pose_as_a_host() -> None:
    """Before NCCL is first used in this process, which reads its settings once."""
    os.environ.update(NCCL_HOSTID=f"host-{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def take(rank: int) -> None:
    """Makes tensors on this rank's GPU from now on."""
    if ON:
        number = rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(number)
        torch.cuda.set_device(number)
        torch.set_default_device(f"cuda:{number}")


def generator(seed: int) -> torch.Generator:
    """Of random numbers on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
