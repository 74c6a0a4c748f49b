"""docs/examples/resume.py started by torchrun, as users start it: what it prints, and its processes."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from examples import EXAMPLES
from processes import ROOT

# Namespaces of networks do not keep processes from reading one another's memory.
APART = {"ZERO_HOST_MEMORY": "0"}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "ZERO_LOG": "info",
}


def script(folder: Path, seconds: float = 0.0, timeout: int | None = None, once: int = 0) -> Path:
    """The example as it is; or one that takes longer for a step, until `folder` has a file `fast`, whose group has
    another time-out, or of which rank 1 takes so many seconds more for one step."""
    path = EXAMPLES / "resume.py"
    text = path.read_text()
    if seconds:
        text = changed(text, "import sys\n", "import os\nimport sys\nimport time\n")
        text = changed(
            text,
            "    step += 1\n",
            f"    step += 1\n    os.path.exists({str(folder / 'fast')!r}) or time.sleep({seconds})\n",
        )
    if timeout:
        text = changed(text, "timedelta(minutes=5)", f"timedelta(seconds={timeout})")
    if once:
        text = changed(text, "import sys\n", "import sys\nimport time\n")
        text = changed(text, "    loss = ", f"    time.sleep({once} if rank == 1 and step == 5 else 0)\n    loss = ")
    if seconds or timeout or once:
        path = folder / "resume.py"
        path.write_text(text)
    return path


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


class Agent:
    """A torchrun with its ranks. log: what they write.

    before: words of a command that runs it, such as on another host.
    """

    def __init__(self, launch: str, script: Path, folder: Path, *given: object, before: str = "", **more: str) -> None:
        self.log = folder.with_name(f"{folder.name}-{time.monotonic_ns()}.log")
        command = [*shlex.split(before), sys.executable, "-m", "torch.distributed.run", *launch.split()]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(script), str(folder), *map(str, given)],
                env={**os.environ, **ENVIRONMENT, **more},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.ended:
            self.kill()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> set[int]:
        pid = self.process.pid
        with suppress(OSError):
            return {*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}
        return set()

    def kill(self) -> None:
        """All its processes at once, as where its machine is lost."""
        for pid in (self.process.pid, *self.ranks()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def worlds(self) -> list[int]:
        """How many ranks each of its starts had."""
        return [*map(int, re.findall(r"^zero: stage .* on (\d+) ranks? by", self.log.read_text(), re.MULTILINE))]


def said(*logs: Path) -> list[tuple[int, float]]:
    """The steps and their losses that these say, in this order."""
    found = [re.findall(r"^step (\d+) loss (\S+)$", log.read_text(), re.MULTILINE) for log in logs]
    return [(int(step), float(loss)) for one in found for step, loss in one]


def losses_of(*agents: Agent) -> dict[int, float]:
    """By step. One that was made twice had the same loss within rounding."""
    losses: dict[int, float] = {}
    for step, loss in said(*(one.log for one in agents)):
        assert abs(loss - losses.get(step, loss)) <= 1e-3 * loss, f"step {step} had another loss before"
        losses[step] = loss
    return losses


def wait_for(there: Callable[[], bool], *agents: Agent, seconds: float = 120) -> None:
    """Fails with what the agents wrote if it does not come, or all of them end before."""
    until = time.monotonic() + seconds
    while not there():
        logs = "\n".join(one.log.read_text() for one in agents)
        assert time.monotonic() < until and not all(one.ended for one in agents), logs
        time.sleep(0.05)


def wait_for_steps(number: int, *agents: Agent) -> None:
    """Until they have made so many more steps."""
    logs = [one.log for one in agents]
    enough = len(said(*logs)) + number
    wait_for(lambda: len(said(*logs)) >= enough, *agents)
