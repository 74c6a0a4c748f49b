"""What holds for every file of zero/, read from the source: no rank starts, nothing is imported.

1. Imports go down only, through ROOMS from the ground up, and a room uses the public names of those below; stage 3 uses
   neither of the other stages. Files form no circle.
2. One folder talks to other ranks.
3. One folder uses torch's private names.
4. No pickle is loaded, but by torch.load(weights_only=True).
5. Every new tensor is told its device: the user's default device may be any.
6. One function warns.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVERY_STAGE = (
    *("setup", "precision", "full_state", "grad_scaler", "graphs"),
    *("ema", "wrappers"),
)
BELOW = ["_torch", "measure", "comm", "tensor_parallel", "shards", "state", "offload", "wrap", "oss", "sdp", "fsdp"]
ROOMS = [*BELOW, EVERY_STAGE, "checkpoint", "plan", "integrations", "top"]
"""Each imports only rooms before it. "top" is all else: `join`, and zero itself, which nothing imports."""
ZERO = sorted(ROOT.glob("zero/**/*.py"))
COMMUNICATING = "zero/comm/"
KNOWS_TORCH = "zero/_torch/"
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PYTHONS_OWN = {"_getframe", "_current_frames", "_fields", "_replace", "_asdict"}
OTHER_LIBRARIES = {"_no_split_modules", "_is_fsdp_managed_module", "_average_model", "_device"}
"""Private names of what zero/integrations/ knows."""
FACTORIES = re.compile(
    r"torch\.(arange|as_tensor|asarray|(bartlett|blackman|hamming|hann|kaiser)_window|empty(_permuted|_quantized|_strided)?"
    r"|eye|fft\.r?fftfreq|full|Generator|(lin|log)space|nested\.nested_tensor|ones|rand(int|n|perm)?|range|scalar_tensor"
    r"|sparse_\w+_tensor|tensor|tri[lu]_indices|zeros)"
)
"""They make tensors on the default device; a generator must be where the tensors are that it fills."""
COMMUNICATION = re.compile(
    "all_gather|all_reduce|all_to_all|barrier|batch_isend_irecv|broadcast|gather|i?recv|i?send|monitored_barrier"
    "|new_group|new_subgroups|reduce|scatter|split_group|_coalescing_manager|ProcessGroup[A-Z]\\w*"
)


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


def imports(path: Path, tree: ast.AST) -> Iterator[tuple[ast.stmt, str, str]]:
    """Every import below `tree` as (statement, full dotted name of what is imported, name that it is bound to)."""
    package = path.parent.parts
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node, name.name, name.asname or name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            for name in node.names:
                yield node, ".".join([*base, *filter(None, [node.module]), name.name]), name.asname or name.name


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain that starts at a name, otherwise nothing."""
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def room(name: str) -> int:
    """The number of the room that `name`, such as zero.oss.comm.gather, belongs to."""
    part = name.split(".")[1] if "." in name else "top"
    found = [number for number, one in enumerate(ROOMS) if part == one or (isinstance(one, tuple) and part in one)]
    return found[0] if found else len(ROOMS) - 1


def upward_imports(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    own = room(".".join(path.with_suffix("").parts))
    for node, name, _ in imports(path, tree):
        if name.split(".")[0] == "zero" and room(name) > own:
            yield node, f"{ROOMS[own]} must not import {name}: imports go down only"
        if ROOMS[own] == "fsdp" and ROOMS[room(name)] in ("oss", "sdp"):
            yield node, f"stage 3 must not import {name}: it is none of the stages below"


def private_names_of_other_rooms(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    own = ".".join(path.with_suffix("").parts[:2])
    bound = {}
    for node, name, alias in imports(path, tree):
        if name.split(".")[0] == "zero" and not f"{name}.".startswith(f"{own}."):
            bound[alias] = name
            if private(name.removeprefix("zero._torch.")):
                yield node, f"{name} is private to its room"
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value).split(".")[0] in bound and private(node.attr):
            yield node, f"{dotted(node)} is private to its room"


def communication(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Uses of torch.distributed's collectives and point-to-point functions, called or passed on."""
    if path.as_posix().startswith(COMMUNICATING):
        return
    modules = {}  # what local names stand for
    for node, name, alias in imports(path, tree):
        modules[alias] = alias if name.startswith(f"{alias}.") else name  # `import a.b` binds a
        if communicates(name):
            yield node, f"only {COMMUNICATING} may use {name}"
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted(node)):
            first, rest = chain.split(".", 1)
            if communicates(name := f"{modules.get(first, first)}.{rest}"):
                yield node, f"only {COMMUNICATING} may use {name}"


def communicates(name: str) -> bool:
    module, _, last = name.rpartition(".")
    distributed = f"{module}.".startswith(("torch.distributed.", "torch.ops.c10d"))
    return distributed and (last == "*" or COMMUNICATION.match(last) is not None)


def private_names_of_torch(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Private names that are imported from torch, or asked of objects and defined neither here nor beside this file."""
    if path.as_posix().startswith(KNOWS_TORCH):
        return
    own = PYTHONS_OWN | {*assigned(tree)} | defined_in(path.parent)
    if path.as_posix().startswith("zero/integrations/"):
        own |= OTHER_LIBRARIES
    for node, name, _ in imports(path, tree):
        if name.split(".")[0] == "torch" and private(name):
            yield node, f"only {KNOWS_TORCH} may use {name}"
    for node in nodes(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.Call(ast.Name("getattr"), [_, ast.Constant(str(name)), *_]):
                if private(name) and name not in own:
                    yield node, f"only {KNOWS_TORCH} may use {name}, if it is torch's"


def assigned(tree: ast.AST) -> Iterator[str]:
    for node in nodes(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


@cache
def defined_in(folder: Path) -> set[str]:
    """Functions and classes of its files."""
    found = (node for path in (ROOT / folder).glob("*.py") for node in nodes(tree_of(path)))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def unpickling(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Whatever runs code that it finds in bytes. Objects between ranks, which are pickled, are `communication`. The
    pickle in checkpoints of torch.distributed.checkpoint may name a closed list of records alone, as its tests show."""
    if path == Path("zero/checkpoint/dcp.py"):
        return
    for node, name, _ in imports(path, tree):
        if name.split(".")[0] in PICKLES:
            yield node, f"{name} runs what foreign bytes tell it to"
    for node in nodes(tree):
        match node:
            case ast.Call(ast.Name("eval" | "exec" as name)):
                yield node, f"{name}() runs what foreign bytes tell it to"
            case ast.Call(ast.Attribute(ast.Name("torch"), "load"), keywords=given):
                if not any(one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in given):
                    yield node, "torch.load must have weights_only=True"
            case ast.Attribute(attr="read_metadata" | "FileSystemReader" | "find_class" as name):
                yield node, f"{name} runs what foreign bytes tell it to"
            case ast.keyword("allow_pickle", ast.Constant(True)):
                yield node.value, "allow_pickle=True runs what foreign bytes tell it to"


def without_device(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    modules = {alias: alias if name.startswith(f"{alias}.") else name for _, name, alias in imports(path, tree)}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and (chain := dotted(node.func)):
            first, *rest = chain.split(".")
            name = ".".join([modules.get(first, first), *rest])
            if FACTORIES.fullmatch(name) and not any(given.arg == "device" for given in node.keywords):
                yield node, f"{name} must have device=: the default device may be any"


def warning(path: Path, tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warning") and path.name != "telling.py":
            yield node, "telling.py warns, so that warnings point to the user's line"


RULES = [upward_imports, private_names_of_other_rooms, communication, private_names_of_torch]
RULES += [unpickling, without_device, warning]


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds(rule):
    assert ZERO, "nothing to read: has zero/ moved?"
    paths = [path.relative_to(ROOT) for path in ZERO]
    found = [(path, *told) for path in paths for told in rule(path, tree_of(ROOT / path))]
    assert not found, "\n" + "\n".join(f"{path}:{node.lineno}: {message}" for path, node, message in found)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (upward_imports, "zero/wrap/bucket.py", "from .. import fsdp"),
        (upward_imports, "zero/fsdp/unit.py", "from ..oss import optimizer"),
        (private_names_of_other_rooms, "zero/wrap/bucket.py", "from ..oss import flat\nflat._bind()"),
        (communication, "zero/sdp/comm.py", "from torch import distributed as d\nsend = d.reduce_scatter_single"),
        (private_names_of_torch, "zero/shards/shard_group.py", "self.module._modules['a']"),
        (unpickling, "zero/checkpoint/read.py", "torch.load(path, weights_only=False)"),
        (without_device, "zero/offload/disk.py", "from torch import zeros as new\nnew(3)"),
        (warning, "zero/oss/optimizer.py", "import warnings\nwarnings.warn('careful')"),
    ],
)
def test_rule_sees_a_violation(rule, path, source):
    assert len(list(rule(Path(path), ast.parse(source)))) == 1


def test_files_form_no_circles():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in ZERO}
    graph = {
        name: {one for _, full, _ in imports(path.relative_to(ROOT), tree_of(path)) for one in named(full, files)}
        - {name}
        for name, path in files.items()
    }
    assert not circles(graph)


def named(full: str, files: Collection[str]) -> set[str]:
    """The file that an import reads."""
    return {full} & {*files} or {full.rpartition(".")[0]} & {*files}


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The sets of files each of which imports all others, directly or not."""
    reached = {name: {*graph[name]} for name in graph}
    for through in graph:
        for name in graph:
            if through in reached[name]:
                reached[name] |= reached[through]
    found = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }
    return [{*one} for one in found]


def test_tests_share_helpers_and_do_not_import_one_another():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^ *(from|import) [\w.]*\btest_", path.read_text(), re.MULTILINE), path
