"""House rules on packages that need all files of the service, or of the client, at once: no import circles, no use of
the private names of another package.

``sources`` are the texts of Python files by their path in the repository, as in "kvstore/arena/arena.py".
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

Broken = tuple[str, int, str]
"""Path, line, message."""
PUBLIC_OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public methods of named tuples. They begin with an underscore so that no field has the same name."""


def broken_rules(sources: Mapping[str, str]) -> Iterator[Broken]:
    """Yield everything that the rules of this file find."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    yield from _circles(sources, trees)
    yield from _private_names(trees)


def _circles(sources: Mapping[str, str], trees: Mapping[str, ast.Module]) -> Iterator[Broken]:
    """Yield circles of modules that import each other, of any length. Imports for types and late imports count."""
    paths = {_module_of(path): path for path in trees}
    edges = {module: _edges(trees[path], sources[path], paths) for module, path in paths.items()}
    for circle in _strong_components(edges):
        first = min(circle)
        line = next(line for target, line in edges[first].items() if target in circle)
        yield paths[first], line, f"import circle of {', '.join(sorted(circle))}: one of them is two rooms"


def _module_of(path: str) -> str:
    parts = Path(path.removeprefix("clients/")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _edges(tree: ast.Module, text: str, modules: Mapping[str, str]) -> dict[str, int]:
    """Return the modules that a module imports, and the line of each import. A package stands for its ``__init__``."""
    lines = text.splitlines()
    found: dict[str, int] = {}
    for line, name, otherwise in _imported(tree):
        target = name if name in modules else otherwise
        if target in modules and "# seam: " not in lines[line - 1]:
            found.setdefault(target, line)
    return found


def _imported(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, imported name, module to take when that name is no module)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}", node.module) for alias in node.names)


def _strong_components(edges: Mapping[str, Mapping[str, int]]) -> list[set[str]]:
    """Return the sets of modules whose imports lead from each module to all others of the set. A module without a way
    back to itself is in no set. Source: Tarjan, Depth-first search and linear graph algorithms, 1972."""
    numbers: dict[str, int] = {}
    lows: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lows[module] = len(numbers)
        stack.append(module)
        for target in edges[module]:
            if target not in numbers:
                visit(target)
            if target in stack:
                lows[module] = min(lows[module], lows[target])
        if lows[module] == numbers[module]:
            component = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(component) > 1 or module in edges[module]:
                found.append(component)

    for module in edges:
        if module not in numbers:
            visit(module)
    return found


def _private_names(trees: Mapping[str, ast.Module]) -> Iterator[Broken]:
    """Yield uses of underscore names that only another room defines. A room is a folder, or a file beside the
    folders."""
    defined: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        defined[_room_of(path)] |= set(_defined(tree))
    for path, tree in trees.items():
        own = defined[_room_of(path)]
        for line, name in _used(tree):
            owners = sorted(room for room, names in defined.items() if name in names)
            if name not in own and owners:
                yield path, line, f"uses {name}, which is {owners[0]}'s own: give that room a name for it"


def _room_of(path: str) -> str:
    folder = Path(path).parent.as_posix()
    return folder if "/" in folder else path


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_OF_TUPLES


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if _is_private(name):
            yield name


def _used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_private(alias.name))
