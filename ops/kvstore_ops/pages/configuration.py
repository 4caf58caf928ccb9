"""docs/configuration.md: every setting with its type, unit, default and meaning, from the classes of kvstore.config."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from kvstore.config import Settings, TenantSettings
from kvstore.units import format_bytes

HEAD = """\
# Configuration

<!-- Made by `python -m kvstore_ops.pages` from the classes in kvstore/config; edit those. -->

Defaults < TOML file (`--config`) < environment < flags of `kvstore serve`. An unknown key, or a value that cannot be
read, stops the start and is named with its source. `kvstore config` prints every value and where it came from.

The same setting in each source:

```toml
# kvstore.toml
[arena]
capacity_bytes = "8 GiB"
[tiers.nvme]
directory = "/mnt/fast/kvstore"
```

```bash
export KVSTORE__ARENA__CAPACITY_BYTES="8 GiB"
export KVSTORE__TIERS__NVME__DIRECTORY=/mnt/fast/kvstore
kvstore serve --capacity "8 GiB" --nvme-directory /mnt/fast/kvstore
```

A *size* is a number of bytes or a text like `64 GiB` or `1.5 GB`; a *duration* a number of seconds or a text like
`30 s`, `250 ms` or `7 d`. A *switch* is `true` or `false`.
"""
TYPES = {"int": "number", "int | None": "number", "str": "text", "bool": "switch", "Path": "path"}
UNITS = {"size": "bytes", "duration": "seconds"}
DEFAULT = "Default:"
DAY_S, MINUTE_S = 86_400, 60


class Entry(NamedTuple):
    """One row: a setting."""

    name: str
    kind: str
    unit: str
    default: str
    meaning: str


def render() -> str:
    """Return the whole page."""
    return HEAD + "".join(_section(name, leaf) for name, leaf in sections())


def sections() -> Iterator[tuple[str, type]]:
    """Yield each section's dotted name and class; a section of sections is given by its parts."""
    for name, leaf in get_type_hints(Settings).items():
        if name == "tenants":
            yield "tenants.NAME", TenantSettings
            continue
        inner = [(f"{name}.{part}", each) for part, each in get_type_hints(leaf).items() if is_dataclass(each)]
        yield from inner or [(name, leaf)]  # type: ignore[misc]  # a dataclass is a type


def entries(section: str, leaf: type) -> list[Entry]:
    """Return the rows of one section. Raises AssertionError naming a setting without a meaning."""
    meanings, hints = _strings_below(leaf), get_type_hints(leaf, include_extras=True)
    found = []
    for field in fields(leaf):
        name = f"{section}.{field.name}"
        meaning, _, stated = meanings.get(field.name, "").partition(DEFAULT)
        assert meaning, f"{name}: say below it, as a string, what it does"
        hint = hints[field.name]
        kind = get_args(hint)[1] if get_origin(hint) is Annotated else TYPES[_type_name(hint)]
        default = stated.strip().removesuffix(".") or _default(field, kind)
        found.append(Entry(name, kind, _unit(name, kind), default, meaning.strip()))
    return found


def _section(name: str, leaf: type) -> str:
    rows = "\n".join(f"| `{each.name}` | {' | '.join(map(_cell, each[1:]))} |" for each in entries(name, leaf))
    about = " ".join((leaf.__doc__ or "").replace("``", "`").split())
    return f"\n## {name}\n\n{about}\n\n| setting | type | unit | default | meaning |\n|---|---|---|---|---|\n{rows}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _strings_below(leaf: type) -> dict[str, str]:
    """Return the string below each field of a class, by the field's name, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(leaf))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _default(field: Field[Any], kind: str) -> str:
    """Return the default as it is written in the file. Raises AssertionError when the class has none, and the string
    below the field states none."""
    value = field.default
    assert value is not MISSING, f"{field.name}: say below it what its default is, after {DEFAULT!r}"
    if value is None:
        return "none"
    if value == "":
        return "empty"
    if kind == "size" and value:
        return format_bytes(value)
    if kind == "duration":
        return _duration(value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        return str(value) if field.name.endswith("_port") else f"{value:,}"
    return f"`{value}`"


def _unit(name: str, kind: str) -> str:
    return "bytes per second" if "bytes_per_s" in name else UNITS.get(kind, "")


def _duration(seconds: float) -> str:
    if seconds and seconds % DAY_S == 0:
        return f"{seconds / DAY_S:g} d"
    if seconds > MINUTE_S and seconds % MINUTE_S == 0:
        return f"{seconds / MINUTE_S:g} min"
    return f"{seconds:g} s" if seconds >= 1 or not seconds else f"{seconds * 1000:g} ms"
