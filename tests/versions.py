"""The versions by which the tests are run: `make matrix-of-versions` runs the quick tests and those of the integrations
by each that is at hand, .github/workflows/ci.yml all tests.

    python tests/versions.py                       runs them, and ends with a table
    python tests/versions.py rows                  the rows as JSON, for the workflow
    python tests/versions.py constraints 2.15.0 newest
                                                   constraints.txt for that torch and those libraries, for the Makefile

No version is written here. Pythons are the classifiers of setup.cfg; torch's are the oldest that it asks for, the one
of constraints.txt, and the newest that zero/_torch names; the libraries' oldest are those that the extras ask for. In
each row one of them differs from what `make test` runs by, so that a failure names its cause, and so that every row
exists: torch 2.15 has no build for Python 3.10.

The standard library suffices to run this file: it is read before anything is installed.
"""

import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from dataclasses import asdict, dataclass
from pathlib import Path

from nightly import in_turn

ROOT = Path(__file__).parents[1]
DEVELOPED_BY = "3.11"
"""The Python by which the whole suite is run, the types are checked, and the documentation is built."""

SETTINGS = ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
BOUNDS = dict(re.findall(r"^([\w-]+)>=(\S+)$", "\n".join(SETTINGS["options.extras_require"].values()), re.MULTILINE))
LIBRARIES = {name: BOUNDS[name] for name in ("accelerate", "lightning", "transformers")}
"""Their oldest versions."""
COMPANIONS = ["peft"]
"""A new transformers refuses an old one of them."""


@dataclass(frozen=True)
class Row:
    """Empty is what the Makefile takes by itself. The environment of row `name` is .venv-NAME."""

    name: str
    python: str = DEVELOPED_BY
    torch: str = ""
    libraries: str = ""

    def variables(self) -> list[str]:
        python = f"python{self.python}" if self.python != DEVELOPED_BY else ""
        given = {"PYTHON": python, "TORCH": self.torch, "LIBRARIES": self.libraries}
        return [f"{name}={value}" for name, value in given.items() if value]


def pythons() -> list[str]:
    return re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$", SETTINGS["metadata"]["classifiers"], re.MULTILINE
    )


def developed_torch() -> str:
    return re.findall(r"^torch==(.*)$", CONSTRAINTS, re.MULTILINE)[0]


def other_torches() -> list[str]:
    oldest = re.findall(r"^torch>=(.*)$", SETTINGS["options"]["install_requires"], re.MULTILINE)
    source = (ROOT / "zero" / "_torch" / "__init__.py").read_text()
    newest = [".".join(found) for found in re.findall(r"^NEWEST_TESTED = \((\d+), (\d+)\)$", source, re.MULTILINE)]
    return [f"{version}.0" for version in oldest + newest]


def rows() -> list[Row]:
    """First the row by which `zero` is developed, which is `make test`."""
    return [
        Row("developed"),
        *(Row(f"python{python}", python=python) for python in pythons() if python != DEVELOPED_BY),
        *(Row(f"torch-{torch}", torch=torch) for torch in other_torches()),
        *(Row(libraries, libraries=libraries) for libraries in ("oldest", "newest")),
    ]


def constraints(torch: str, libraries: str) -> str:
    """Of the newest libraries there is no line: pip takes what it finds."""
    text = re.sub(r"^(torch==).*$", rf"\g<1>{torch or developed_torch()}", CONSTRAINTS, flags=re.MULTILINE)
    if libraries == "newest":
        return re.sub(rf"^({'|'.join([*LIBRARIES, *COMPANIONS])})==.*\n", "", text, flags=re.MULTILINE)
    for name, oldest in LIBRARIES.items() if libraries else ():
        text = re.sub(rf"^({name}==)[^;\n]*", rf"\g<1>{oldest}", text, flags=re.MULTILINE)
    return text


def not_at_hand(row: Row) -> str:
    """Why the row cannot be run, or only after a download of gigabytes; empty where it can."""
    if (ROOT / f".venv-{row.name}" / ".ready").exists():
        return ""
    python = shutil.which(f"python{row.python}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        return f"no python{row.python}"
    torch = f"torch=={row.torch or developed_torch()}"
    ask = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", torch]
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", *ask], capture_output=True, text=True
    )
    if asked.returncode:
        return asked.stderr.strip().rpartition("\n")[2]
    needed = json.loads(asked.stdout)["install"][0]["metadata"].get("requires_dist", [])
    if any(re.match(r"nvidia-|cuda-", requirement) for requirement in needed):
        return f"{torch} is a build for CUDA; `make test-quick {' '.join(row.variables())}` downloads it"
    return ""


def commands(row: Row) -> list[list[str]] | str:
    given = row.variables()
    return not_at_hand(row) or [["make", "test-quick", *given], ["make", "test", "ARGS=tests/integrations", *given]]


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            sys.exit(in_turn({row.name: commands(row) for row in rows()[1:]}))
        case ["rows"]:
            print(json.dumps([asdict(row) for row in rows()]))
        case ["constraints", torch, libraries] if libraries in ("", "oldest", "newest"):
            print(constraints(torch, libraries), end="")
        case _:
            sys.exit(__doc__)
