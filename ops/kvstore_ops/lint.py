"""House rules that ruff cannot check: the calls and imports that a package may use, the length of files and functions,
and one definition per public name of the service and the client.

Seams: outside ``kvstore/seams`` no clock, no randomness, no bare thread, no stray task. Only tests import tests.
Hostile bytes: nowhere a reader that can run code. Imports point one way and in no circle, and no room (package) uses
another room's private names. Tiers: the service asks a tier only through its contract, and only a residency's tier
reads that number. Planes: the client's rooms never ask for the class of a plane's object. A line may carry
``# seam: <reason>`` where a rule must yield.

    python -m kvstore_ops.lint
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore_ops.rooms import broken_rules

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60

SEAMED_MODULES = {"time", "random", "secrets", "uuid"}
SEAMED_CALLS = {
    "os.urandom",
    "threading.Thread",
    "threading.Timer",
    "asyncio.create_task",
    "asyncio.ensure_future",
    "loop.create_task",
}
SEAMS = "kvstore/seams/"
HOSTILE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "tarfile"}
CHECKING_ROOMS = ("kvstore/remote/", "kvstore/server/")
SECRET_NAMES = {"authorization", "digest", "given", "mac", "password", "secret", "secrets", "token", "tokens"}
HOSTILE_CALLS = {"torch.load", "yaml.load", "eval", "exec"}

# Layers of the service, outermost first. A room imports only from layers below its own.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"remote"}),
    frozenset({"server"}),
    frozenset({"controller", "wire"}),
    frozenset({"movement", "planning"}),
    frozenset({"catalog", "directory", "tiers"}),
    frozenset({"arena", "chunk", "handoff", "keys", "presence", "telemetry"}),
    frozenset({"config"}),
    frozenset({"policy"}),
    frozenset({"spec", "v1", "v1alpha"}),
    frozenset({"errors", "units", "seams"}),
)
SAME_LAYER = {
    ("catalog", "tiers"),
    ("chunk", "keys"),
    ("movement", "planning"),
    ("seams", "errors"),
    ("units", "errors"),
}
NVME_MAY_BE_NAMED = ("kvstore/tiers/nvme/", "kvstore/server/tiers.py")
PLANES = "clients/kvstore_client/planes/"
CLIENT_MAY_IMPORT = {
    *("spec", "keys", "chunk", "planning", "presence", "handoff", "wire", "errors", "units", "seams"),
    *("v1", "v1alpha"),
}
COPIES_MUST_NOT_IMPORT = {"kvstore", "kvstore_client", "kvstore_kernels", "kvstore_ops", "torch"}
PLANNING_MAY_IMPORT = {
    *(
        "__future__",
        "bisect",
        "blake3",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
    ),
    "typing",
    *("kvstore", "kvstore.errors", "kvstore.keys", "kvstore.planning", "kvstore.spec", "kvstore.units"),
}
"""The imports of planning. It is pure, and runs where neither torch nor grpc is installed."""


@dataclass(frozen=True)
class Finding:
    """One broken rule at one line."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_source(path: str, text: str) -> list[Finding]:
    """Return all findings in one file. ``path`` is relative to the repository; it decides which rules apply."""
    tree = ast.parse(text)
    lines = text.splitlines()
    seamed = path.startswith(("kvstore/", "clients/")) and not path.startswith(SEAMS)
    found = list(_hostile(path, tree))
    if path.startswith(CHECKING_ROOMS):
        found += _secrets(path, tree)
        found += _reaching(path, tree)
    if seamed:
        found += _seams(path, tree)
    if path.startswith("kvstore/planning/"):
        found += _impure(path, tree)
    if path.startswith(("kvstore/", "clients/")):
        found += _imports(path, tree)
    if path.startswith("kernels/kvstore_copies/"):
        found += _copies(path, tree)
    if path.startswith("clients/") and not path.startswith(PLANES):
        found += _planes(path, tree)
    if not path.startswith("tests/"):
        found += _tests(path, tree)
    if path.startswith("kvstore/"):
        found += _nvme(path, tree)
        found += _residencies(path, tree)
    found = [finding for finding in found if "# seam: " not in lines[finding.line - 1]]
    return found + list(_lengths(path, tree, len(lines)))


def _called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module


def _named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that ``from module import name`` imports, as module.name, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _seams(path: str, tree: ast.AST) -> Iterator[Finding]:
    for line, module in _imported(tree):
        if module.split(".")[0] in SEAMED_MODULES:
            yield Finding(path, line, f"imports {module}: take it from kvstore.seams")
    for line, name in _named(tree):
        if name in SEAMED_CALLS:
            yield Finding(path, line, f"imports {name}: use kvstore.seams")
    for line, name in _called(tree):
        if name in SEAMED_CALLS or (name.endswith(".create_task") and not name.startswith(("group.", "tasks."))):
            yield Finding(path, line, f"calls {name}: use kvstore.seams, or a TaskGroup named group or tasks")


def _impure(path: str, tree: ast.AST) -> Iterator[Finding]:
    named = [(line, name) for line, name in _named(tree) if name.startswith("kvstore.") and name.count(".") == 1]
    for line, module in [*_imported(tree), *named]:
        room = f"kvstore.{_room(module)}" if _room(module) else module.split(".")[0]
        if room not in PLANNING_MAY_IMPORT:
            yield Finding(path, line, f"imports {module}: planning is pure, it may import PLANNING_MAY_IMPORT only")
    for line, name in _called(tree):
        if name in ("open", "print", "input"):
            yield Finding(path, line, f"calls {name}: planning is pure")


def _hostile(path: str, tree: ast.AST) -> Iterator[Finding]:
    for line, module in _imported(tree):
        if module.split(".")[0] in HOSTILE_MODULES:
            yield Finding(path, line, f"imports {module}: it can run code from the bytes it reads")
    for line, name in _named(tree):
        if name in HOSTILE_CALLS:
            yield Finding(path, line, f"imports {name}: it can run code from the bytes it reads")
    for line, name in _called(tree):
        if name in HOSTILE_CALLS:
            yield Finding(path, line, f"calls {name}: it can run code from the bytes it reads")
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield Finding(path, node.value.lineno, "allow_pickle: it can run code from the bytes it reads")


def _secrets(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Yield comparisons of secrets by ``==`` or ``!=``: their time would reveal how much of a secret was right."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(isinstance(each, ast.Eq | ast.NotEq) for each in node.ops):
            names = {ast.unparse(side).rpartition(".")[2] for side in (node.left, *node.comparators)}
            if secrets := {name for name in names if set(name.split("_")) & SECRET_NAMES}:  # constants are none
                yield Finding(path, node.lineno, f"compares {min(secrets)} by ==: use hmac.compare_digest")


def _reaching(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Yield accesses that reach through the controller: callers use the controller's own methods, so that its parts can
    change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            whole = ast.unparse(node.value.value)
            if whole.rpartition(".")[2] in ("controller", "_controller"):
                yield Finding(path, node.lineno, f"{ast.unparse(node)} reaches through the controller: ask it")


def _planes(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Yield type checks on classes of a plane: sessions, prefixes and stores have methods for what differs by plane."""
    known = {name.rpartition(".")[2] for _, name in _named(tree) if name.startswith("kvstore_client.planes")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "type", "issubclass"):
            if named := sorted(known & {word for each in node.args[1:] for word in _words(each)}):
                yield Finding(path, node.lineno, f"asks whether it is a {named[0]}: a plane answers that itself")


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "kvstore" and len(parts) > 1 else ""


def _layer(room: str) -> int:
    return next((index for index, rooms in enumerate(LAYERS) if room in rooms), -1)


def _imports(path: str, tree: ast.AST) -> Iterator[Finding]:
    client = path.startswith("clients/")
    own = Path(path).with_suffix("").parts[1] if path.startswith("kvstore/") else ""
    named = [(line, name) for line, name in _named(tree) if name.startswith("kvstore.") and name.count(".") == 1]
    for line, name in _named(tree):
        if name.startswith("."):
            yield Finding(path, line, f"imports {name}: name the room in full, from kvstore")
    for line, module in [*_imported(tree), *named]:
        room = _room(module)
        if not room or room == own or room.startswith("__"):
            continue
        if client:
            if room not in CLIENT_MAY_IMPORT:
                yield Finding(path, line, f"the client imports kvstore.{room}: it must not need the server's rooms")
        elif own in ("", "__init__") or (own, room) in SAME_LAYER:
            continue
        elif _layer(own) < 0 or _layer(room) < 0:
            yield Finding(path, line, f"kvstore.{own} -> kvstore.{room}: give both a layer in kvstore_ops.lint")
        elif _layer(room) <= _layer(own):
            yield Finding(path, line, f"kvstore.{own} imports kvstore.{room}: imports point one way, downwards")


def _copies(path: str, tree: ast.AST) -> Iterator[Finding]:
    for line, module in _imported(tree):
        if module.split(".")[0] in COPIES_MUST_NOT_IMPORT:
            yield Finding(path, line, f"kvstore_copies imports {module}: it copies memory, and knows nothing of it")


def _tests(path: str, tree: ast.AST) -> Iterator[Finding]:
    for line, module in _imported(tree):
        if module.split(".")[0] == "tests":
            yield Finding(path, line, f"imports {module}: an installed kvstore has no tests")


def _nvme(path: str, tree: ast.AST) -> Iterator[Finding]:
    if path.startswith(NVME_MAY_BE_NAMED):
        return
    lines = {line for line, module in _imported(tree) if f"{module}.".startswith("kvstore.tiers.nvme.")}
    lines |= {line for line, name in _named(tree) if name == "kvstore.tiers.nvme"}
    lines |= {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "NvmeTier"}
    for line in sorted(lines):
        yield Finding(path, line, "names the NVMe tier: ask what the contract has; kvstore/server/tiers.py builds it")


def _residencies(path: str, tree: ast.AST) -> Iterator[Finding]:
    """Yield shifts and masks of values named residency. The bit ``UNPROVEN`` is the catalog's own, and allowed."""
    if path.startswith("kvstore/tiers/"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift | ast.LShift | ast.BitAnd | ast.BitOr):
            sides = [_words(node.left), _words(node.right)]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.RShift | ast.LShift | ast.BitAnd | ast.BitOr):
            sides = [_words(node.target), _words(node.value)]
        else:
            continue
        is_one = any(word.lstrip("_").startswith("residenc") for side in sides for word in side)
        if is_one and {"UNPROVEN"} not in sides:
            yield Finding(path, node.lineno, "takes a residency apart: only its tier knows what the number means")


def _words(tree: ast.AST) -> set[str]:
    """Return the names in an expression."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _lengths(path: str, tree: ast.AST, line_count: int) -> Iterator[Finding]:
    if line_count > FILE_LINES_MAX:
        yield Finding(path, 1, f"{line_count} lines, at most {FILE_LINES_MAX}: a room is missing")
    if path.startswith("tests/"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield Finding(path, node.lineno, f"{node.name} has {length} lines, at most {FUNCTION_LINES_MAX}")


def defined_by(node: ast.stmt) -> str:
    """Return the name of the function, class or alias of a type that a statement defines; empty for another one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
        target = node.targets[0]
        if isinstance(target, ast.Name) and any(letter.islower() for letter in target.id):  # else it is a constant
            return target.id
    return ""


def shared_names(sources: Mapping[str, str]) -> list[Finding]:
    """Return public functions and classes that are defined more than once. ``sources``: the text of each
    file by its path."""
    places: dict[str, list[tuple[str, int]]] = {}
    for path, text in sources.items():
        for node in ast.parse(text).body:
            name = defined_by(node)
            if name and name[0] != "_":
                places.setdefault(name, []).append((path, node.lineno))
    found = []
    for name, defined in places.items():
        if len(defined) > 1:
            where = ", ".join(path for path, _ in defined)
            found.append(Finding(*defined[-1], f"{name} is defined in {where}: one name, one definition"))
    return found


def check_tree(root: Path = ROOT) -> list[Finding]:
    """Return all findings in the repository."""
    found: list[Finding] = []
    service: dict[str, str] = {}
    client: dict[str, str] = {}
    for top in ("kvstore", "clients", "kernels", "ops", "tests"):
        for file in sorted((root / top).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if not path.startswith(("kvstore/v1/", "kvstore/v1alpha/")):
                text = file.read_text(encoding="utf-8")
                found += check_source(path, text)
                if path.startswith("kvstore/"):
                    service[path] = text
                elif path.startswith("clients/"):
                    client[path] = text
    broken = [Finding(*each) for sources in (service, client) for each in broken_rules(sources)]
    return found + shared_names({**service, **client}) + broken


def main() -> int:
    """Print the findings. Return 0 when there are none."""
    found = check_tree()
    for finding in found:
        print(finding)
    print(f"lint: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
