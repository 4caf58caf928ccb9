"""Reads the settings from their sources, in order, and remembers the origin of each."""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from kvstore.config.defaults import arena_limits, dependent_defaults, derived_defaults, device_defaults
from kvstore.config.fields import without_password
from kvstore.config.machine import device_room_bytes, kept_capacity_bytes, memory_limit_bytes
from kvstore.config.settings import Settings, TierSettings
from kvstore.config.tenants import DEFAULT_TENANT, TenantSettings, check_name, check_tenants
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.units import NUMBER_STOP, parse_bytes, parse_duration

PREFIX = "KVSTORE__"
DEFAULT = "default"
TENANTS = "tenants"
FLAGS = types.MappingProxyType(
    {
        "arena.capacity_bytes": "--capacity",
        "tiers.nvme.capacity_bytes": "--nvme",
        "tiers.nvme.directory": "--nvme-directory",
    }
)
"""Flags of ``kvstore serve`` that are not named as their setting."""
KINDS = types.MappingProxyType({bool: "true or false", Path: "a path", str: "a text: write it in quotes"})
"""The words for a value of a type in an error; other types are whole numbers."""


class SettingSources(NamedTuple):
    """The arguments of ``load``, kept to load the same sources again."""

    path: Path | None = None
    environment: Mapping[str, str] = types.MappingProxyType({})
    flags: Mapping[str, object] = types.MappingProxyType({})


NO_SOURCES = SettingSources()


@dataclass(frozen=True, kw_only=True)
class LoadedSettings:
    """The tree, and the origin of each value by ``section.field``."""

    settings: Settings
    origins: Mapping[str, str]
    sources: SettingSources = NO_SOURCES

    def again(self) -> LoadedSettings:
        """Load the same sources again, as they are now. Raises as ``load``."""
        return load(*self.sources)

    def is_default(self, name: str) -> bool:
        return self.origins[name] == DEFAULT

    def value(self, name: str) -> object:
        """Return a setting's value as it is, passwords included."""
        return _value(self.settings, name)

    def rows(self) -> list[tuple[str, object, str]]:
        """(setting, value, origin) for each setting, in the tree's order. Passwords in URLs are not shown."""
        return [(name, _shown(_value(self.settings, name)), origin) for name, origin in self.origins.items()]

    def of_tenant(self, name: str) -> Settings:
        """Return the tree for one tenant: with its own arena, device directory, sockets and tokens, and with default
        limits that follow from its own arena. All other settings are shared by the tenants."""
        tree, tenant = self.settings, self.settings.tenants.get(name)
        if tenant is None:
            return tree
        nvme, server, remote = tree.tiers.nvme, tree.server, tree.remote
        hbm_bytes = tenant.hbm_capacity_bytes or (tree.tiers.hbm.capacity_bytes if name == DEFAULT_TENANT else 0)
        if name != DEFAULT_TENANT:
            nvme = replace(nvme, directory=nvme.directory / TENANTS / name)
            server = replace(server, socket_directory=server.socket_directory / name)
            remote = replace(remote, token_file="")
        follow = {
            limit: value
            for limit, value in arena_limits(tenant.capacity_bytes).items()
            if self.is_default(f"limits.{limit}")
        }
        return replace(
            tree,
            server=server,
            arena=replace(tree.arena, capacity_bytes=tenant.capacity_bytes),
            tiers=replace(
                tree.tiers,
                nvme=replace(nvme, capacity_bytes=tenant.nvme_capacity_bytes),
                hbm=replace(tree.tiers.hbm, capacity_bytes=hbm_bytes),
            ),
            limits=replace(tree.limits, **follow),
            remote=replace(remote, token_file=tenant.token_file or remote.token_file),
        )


def _value(node: Any, name: str) -> object:
    """Return the value of ``section.field``; tenants are a mapping."""
    for part in name.split("."):
        node = node[part] if isinstance(node, Mapping) else getattr(node, part)
    return node


def _shown(value: object) -> object:
    return without_password(value) if isinstance(value, str) else value


def _sections() -> dict[str, Any]:
    """Return every section's leaf class, by its dotted name; sections of sections are flattened."""
    found: dict[str, Any] = {}
    for name, leaf in get_type_hints(Settings).items():
        if name == TENANTS:
            continue  # the user chooses the names of the tenants' sections
        inner = {part: each for part, each in get_type_hints(leaf).items() if is_dataclass(each)}
        found.update({f"{name}.{part}": each for part, each in inner.items()} or {name: leaf})
    return found


def _schema() -> dict[str, dict[str, Any]]:
    return {name: get_type_hints(leaf, include_extras=True) for name, leaf in _sections().items()}


def _read(text: object, hint: Any) -> object:
    """Convert one value to its field's type. Raises ValueError, KeyError or InvalidRequest."""
    if get_origin(hint) is Annotated:
        return parse_bytes(text) if get_args(hint)[1] == "size" else parse_duration(text)  # type: ignore[arg-type]  # both reject what they cannot read
    if hint is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return text if isinstance(text, bool) else words[str(text).lower()]
    if hint in (int, int | None):
        if isinstance(text, bool | float):
            raise ValueError(text)
        count = int(str(text))
        if not -NUMBER_STOP < count < NUMBER_STOP:
            raise InvalidRequest("the number is too large")
        return count
    if hint is Path:
        if not isinstance(text, str | Path) or not str(text) or "\0" in str(text):
            raise ValueError(text)
        return Path(text).expanduser()
    if not isinstance(text, str):
        raise ValueError(text)
    return text


class _Sources:
    """Values gathered so far, each with its origin."""

    def __init__(self) -> None:
        self.schema = _schema()
        self.values: dict[str, dict[str, object]] = {section: {} for section in self.schema}
        self.origins: dict[str, str] = {}
        self.misspelt = {
            f"{PREFIX}{section}_{name}".upper().replace("__", "_").replace(".", "_"): _variable(section, name)
            for section, leaf in self.schema.items()
            for name in leaf
        }
        self.groups = (TENANTS, *dict.fromkeys(name.partition(".")[0] for name in self.schema if "." in name))

    def known(self, section: str, origin: str) -> dict[str, Any]:
        group, _, name = section.partition(".")
        if group == TENANTS and section not in self.schema:
            try:
                check_name(name)
            except InvalidRequest as error:
                raise InvalidRequest(f"{origin}: {error.message}") from error
            self.schema[section] = get_type_hints(TenantSettings, include_extras=True)
            self.values[section] = {}
        found = self.schema.get(section)
        if found is None:
            raise InvalidRequest(
                f"{origin}: unknown section [{section}]{_closest(section, [*self.schema, *self.groups])}"
            )
        return found

    def put(self, section: str, name: str, text: object, origin: str) -> None:
        known = self.known(section, origin)
        if name not in known:
            raise InvalidRequest(f"{origin}: unknown setting {section}.{name}{_closest(name, known)}")
        hint = known[name]
        try:
            self.values[section][name] = _read(text, hint)
        except InvalidRequest as error:
            raise InvalidRequest(f"{origin}: {section}.{name}: {error.message}") from error
        except (ValueError, KeyError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            kind = KINDS.get(hint, "a whole number")
            raise InvalidRequest(f"{origin}: {section}.{name} = {text!r} is not {kind}") from error
        self.origins[f"{section}.{name}"] = origin

    @property
    def tenants(self) -> list[str]:
        return [section for section in self.values if section.startswith(f"{TENANTS}.")]

    def fill(self, defaults: dict[str, dict[str, object]]) -> None:
        for section, leaf in defaults.items():
            for name, value in leaf.items():
                self.values[section].setdefault(name, value)
                self.origins.setdefault(f"{section}.{name}", DEFAULT)


def _variable(section: str, name: str) -> str:
    """Return the environment's variable for a setting."""
    return f"{PREFIX}{section}__{name}".replace(".", "__").upper()


def _closest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no text, a number of thousands of digits
        raise InvalidRequest(f"{path}: not valid TOML: {error}") from error


def load(
    path: Path | None = None,
    environment: Mapping[str, str] = types.MappingProxyType({}),
    flags: Mapping[str, object] = types.MappingProxyType({}),
) -> LoadedSettings:
    """Gather the settings. ``flags`` maps "section.field" to a value; None means not given.

    Raises: InvalidRequest naming the source and the setting.
    """
    sources = _Sources()
    for section, leaf in _toml_sections(path, sources.groups):
        sources.known(section, f"{path}")
        for name, text in leaf.items():
            sources.put(section, name, text, f"{path}")
    for variable, text in sorted(environment.items()):
        meant = sources.misspelt.get(variable.replace("__", "_"), variable)
        if meant != variable:
            raise InvalidRequest(f"{variable} is no setting: its parts have two underscores between them: {meant}")
        if variable.startswith(PREFIX):
            section, _, name = variable[len(PREFIX) :].lower().replace("__", ".").rpartition(".")
            if not section:
                raise InvalidRequest(f"{variable} is no setting: it has a section and a name: {PREFIX}SECTION__NAME")
            sources.put(section, name, text, variable)
    for flag, value in flags.items():
        if value is not None:
            section, _, name = flag.rpartition(".")
            sources.put(section, name, value, FLAGS.get(flag, f"--{name.replace('_', '-')}"))
    memory_bytes = memory_limit_bytes()
    sources.fill(derived_defaults(environment, memory_bytes))
    state, capacity = sources.values["server"]["state_directory"], sources.values["arena"]["capacity_bytes"]
    assert isinstance(state, Path)
    assert isinstance(capacity, int)
    sources.fill(dependent_defaults(environment, state, capacity))
    directory = sources.values["tiers.nvme"]["directory"]
    assert isinstance(directory, Path)
    sources.fill(device_defaults(device_room_bytes(directory), kept_capacity_bytes(directory)))
    share = sources.values["tiers.nvme"]["capacity_bytes"]
    is_default = sources.origins["tiers.nvme.capacity_bytes"] == DEFAULT
    for section in sources.tenants:
        kept = kept_capacity_bytes(directory / TENANTS / section.partition(".")[2]) if is_default else 0
        sources.fill({section: {"capacity_bytes": capacity, "nvme_capacity_bytes": kept or share}})
    return replace(_build(sources, memory_bytes), sources=SettingSources(path, dict(environment), dict(flags)))


def _toml_sections(path: Path | None, groups: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sections of a file; those inside ``[tiers]`` and ``[tenants]`` by their dotted names."""
    for section, leaf in (_toml(path) if path else {}).items():
        if not isinstance(leaf, dict):
            raise InvalidRequest(f"{path}: {section} is no setting: settings stand below their section, as in [arena]")
        if section not in groups:
            yield section, leaf
            continue
        for name, inner in leaf.items():
            if not isinstance(inner, dict):
                raise InvalidRequest(f"{path}: {section}.{name} must be a section: [{section}.{name}]")
            yield f"{section}.{name}", inner


def _build(sources: _Sources, memory_bytes: int) -> LoadedSettings:
    leaves: dict[str, Any] = {}
    classes = {**_sections(), **dict.fromkeys(sources.tenants, TenantSettings)}
    try:
        for section, leaf in classes.items():
            leaves[section] = leaf(**sources.values[section])
        tenants = {section.partition(".")[2]: leaves[section] for section in sources.tenants}
        sockets, device = leaves["server"].socket_directory, leaves["tiers.nvme"].directory
        check_tenants(tenants, sockets, device, leaves["arena"].capacity_bytes, memory_bytes)
        whole = {name: leaf for name, leaf in leaves.items() if "." not in name}
        inner = {name.partition(".")[2]: leaf for name, leaf in leaves.items() if name.startswith("tiers.")}
        settings = Settings(tiers=TierSettings(**inner), tenants=tenants, **whole)
    except KVStoreError as error:
        origin = sources.origins.get(str(error.fields.get("setting", "")))  # none: the setting is missing
        raise InvalidRequest(f"{origin}: {error.message}" if origin else error.message) from error
    names = [f"{section}.{field.name}" for section in leaves for field in fields(leaves[section])]
    origins = {name: sources.origins.get(name, DEFAULT) for name in names}
    return LoadedSettings(settings=settings, origins=origins)
