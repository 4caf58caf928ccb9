"""``kvstore scan``: the chunks in the bucket of tiers.s3, by tenant and model, read from the objects themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvstore.config import S3Settings, Settings
from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.seams import EnvelopeRing
from kvstore.server.secrets import read_envelope_keys, read_keys
from kvstore.spec import CacheKind
from kvstore.tiers.s3.listing import Examined, delete_objects, examine, pages
from kvstore.units import format_bytes
from kvstore.wire import spec_from_message
from kvstore_ops import tenants as doors
from kvstore_ops.door import door_of
from kvstore_ops.operators.harmless import cell
from kvstore_ops.status import age_of

PAGE_COUNT = 64
"""Objects that are examined between two lines of progress."""
MODEL_DIGITS = 12
DIGITS_MIN = 8
"""Digits of a tenant's or model's digest that tell it from others, for a deletion."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The selection of objects to count or delete: the first digits of a tenant's digest, and of the fingerprints of a
    model's caches. Empty: all."""

    tenant: str = ""
    models: tuple[str, ...] = ()
    older_than_s: float = 0.0

    def has(self, found: Examined, now_s: float) -> bool:
        """True when the selection contains an object. An object without a readable header has no tenant or model, so
        only its age can select it."""
        if now_s - found.listed.modified_s < self.older_than_s:
            return False
        if not (self.tenant or self.models):
            return True
        if found.header is None:
            return False
        is_tenant = found.header.tenant_digest.hex().startswith(self.tenant)
        return is_tenant and (not self.models or found.header.fingerprint.hex().startswith(self.models))


def wanted_of(settings: Settings, tenant: str, model: str, older_than_s: float, *, is_for_deletion: bool) -> Wanted:
    """Return the selection that an operator means. ``tenant``: a name of the settings, which means that tenant and no
    other, or the first digits of a digest. ``model``: the id, or its last part, of a model that this node's sidecar
    knows, or the first digits of a fingerprint. A deletion takes no fewer than ``DIGITS_MIN`` digits: fewer may be
    another's, too. Raises InvalidRequest."""
    exact = {name: digest for digest, name in names_of_tenants(settings).items()}.get(tenant)
    least = DIGITS_MIN if is_for_deletion else 1
    if tenant and exact is None:
        _check_digits("--tenant", tenant, least, "no tenant of the settings has this name")
    caches = caches_of(names_of_models(socket_of(settings)), model) if model else ()
    if model and not caches:
        why = "objects have no names of models, and no sidecar of this node knows one that is called so"
        _check_digits("--model", model, least, why, ", or kvstore models on a node that serves it")
        caches = (model.lower(),)
    return Wanted(tenant=exact or tenant.lower(), models=caches, older_than_s=older_than_s)


def _check_digits(option: str, digits: str, least: int, why: str, more: str = "") -> None:
    if len(digits) < least or not set(digits.lower()) <= set("0123456789abcdef"):
        raise InvalidRequest(
            f"{option} {digits}: {why}; give at least {least} hexadecimal digits, as kvstore scan shows them{more}"
        )


class KnownModel(NamedTuple):
    """A model that this node's sidecar knows. ``fingerprint``: of the model itself, in digits: it tells two models of
    one id apart."""

    model_id: str
    fingerprint: str


def caches_of(models: Mapping[str, KnownModel], name: str) -> tuple[str, ...]:
    """Return the fingerprints of the caches of the model whose id, or the id's last part, is ``name``; empty where none
    of ``models`` (by the fingerprints of their caches) is called so. Raises InvalidRequest where several are."""
    found = {each for each in models.values() if each.model_id == name}
    found = found or {each for each in models.values() if each.model_id.rpartition("/")[2] == name}
    if len(found) > 1:
        known = ", ".join(sorted(f"{each.model_id} ({each.fingerprint[:16]})" for each in found))
        raise InvalidRequest(f"--model {name}: several models are called so: say the digits of one: {known}")
    return tuple(digits for digits, each in models.items() if each in found)


@dataclass
class Row:
    """The chunks of one tenant, model and kind. ``model``: digits of its fingerprint; ``model_id``: empty where the
    node's sidecar does not know it. Times are wall seconds."""

    tenant: str
    model: str
    kind: str
    model_id: str = ""
    chunk_count: int = 0
    byte_count: int = 0
    oldest_s: float = 0.0
    newest_s: float = 0.0

    def add(self, found: Examined) -> None:
        """Count one more chunk."""
        written_s = found.listed.modified_s
        self.oldest_s = min(self.oldest_s or written_s, written_s)
        self.newest_s = max(self.newest_s, written_s)
        self.chunk_count += 1
        self.byte_count += found.listed.byte_count


@dataclass
class Found:
    """The counts of a scan. ``damaged``: numbers of damaged objects by their problem. ``newer``: objects that only a
    newer release can read. ``archived``: objects that were moved to an archive, which gives no bytes: nobody can tell
    whether they are damaged. ``unread``: objects that are too large to be read whole: only their headers are checked.
    ``unopened``: objects in envelopes whose key is not in the configuration: they were to be read whole, and are not
    checked. ``foreign``: objects that are no chunks. ``renewed``: objects that were to be deleted, and were stored anew
    after they had been examined."""

    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    newer_count: int = 0
    archived_count: int = 0
    unread_count: int = 0
    unopened_count: int = 0
    foreign_count: int = 0
    object_count: int = 0
    byte_count: int = 0
    deleted_count: int = 0
    deleted_bytes: int = 0
    renewed_count: int = 0

    def add(self, found: Examined, tenants: dict[str, str], models: dict[str, KnownModel]) -> None:
        """Count one object. ``tenants``: names by digests; ``models``: by the fingerprints of their caches."""
        self.object_count += 1
        self.byte_count += found.listed.byte_count
        self.unread_count += found.is_too_large
        self.unopened_count += found.is_unopened
        if found.reason == "newer":
            self.newer_count += 1
        elif found.reason == "archived":
            self.archived_count += 1
        elif found.reason:
            self.damaged[found.reason] = self.damaged.get(found.reason, 0) + 1
        elif found.header is not None:
            digest = found.header.tenant_digest.hex()
            whole, kind = found.header.fingerprint.hex(), str(found.header.kind)
            tenant, model = tenants.get(digest, digest), whole[:MODEL_DIGITS]
            model_id = models[whole].model_id if whole in models else ""
            self.rows.setdefault((tenant, model, kind), Row(tenant, model, kind, model_id)).add(found)

    @property
    def is_all_checked(self) -> bool:
        """True when no object was left out of a check of all bytes."""
        return not (self.newer_count or self.archived_count or self.unread_count or self.unopened_count)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as plain values for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows.values()]}


def settings_of(settings: Settings) -> S3Settings:
    """Return the settings of the S3 tier. Raises InvalidRequest when no bucket is set."""
    if not settings.tiers.s3.bucket:
        raise InvalidRequest("tiers.s3.bucket is not set: name the bucket to scan, as the service does")
    return settings.tiers.s3


def names_of_tenants(settings: Settings) -> dict[str, str]:
    """Return the tenants' names by their digests: objects contain only the digests."""
    return {keys.digest.hex(): name for name, keys in read_keys(settings.tenants).items()}


def socket_of(settings: Settings) -> Path:
    """Return the socket of this node's sidecar: $KVSTORE_SOCKET as for other commands, else that of the settings."""
    named = door_of(None).socket if os.environ.get("KVSTORE_SOCKET") else None
    return named or settings.server.socket_directory / "kvstore.sock"


def names_of_models(place: Path) -> dict[str, KnownModel]:
    """Return models by the fingerprints of their caches, as far as the sidecar of this socket knows them. Objects
    contain only the fingerprints. Empty where no sidecar runs, or it serves another user."""
    if not os.path.exists(place):  # also False where its directory is another user's
        return {}
    door = door_of(str(place), "", "")
    told = doors.ask({"": door, **doors.beside(door)}).values()
    names: dict[str, KnownModel] = {}
    for model in (each for stats in told if not isinstance(stats, str) for each in stats.models):
        known = KnownModel(model.model_id, model.fingerprint.hex())
        names[known.fingerprint] = known
        if model.spec.layers:
            spec = spec_from_message(model.spec)
            for layer in range(spec.layer_count):
                names[fingerprint(spec, CacheKind.E, layer).hex()] = known
    return names


def ring_of(settings: Settings) -> EnvelopeRing:
    """Return the envelope keys of all tenants of the settings. Raises InvalidRequest for a file that is no key file."""
    keys = read_keys(settings.tenants)
    return EnvelopeRing([key for name in keys for key in read_envelope_keys(keys[name], settings.tenants.get(name))])


def scan(
    settings: Settings, wanted: Wanted, *, verify: bool, delete: bool, now_s: float,
    progress: Callable[[Found], None] = lambda _: None,
) -> Found:  # fmt: skip
    """Examine every object, and count those that are ``wanted``; with ``delete``, delete these. Objects of a newer
    release, objects that are no chunks, and what was stored anew since it was examined are never deleted. Raises
    InvalidRequest, PermissionDenied, Unavailable."""
    s3, tenants, found = settings_of(settings), names_of_tenants(settings), Found()
    models = names_of_models(socket_of(settings))
    ring = ring_of(settings) if verify else None
    for each in _examined(s3, found, ring):
        meant = [one for one in each if one.reason != "gone" and wanted.has(one, now_s)]
        for one in meant:
            found.add(one, tenants, models)
        doomed = [one.listed for one in meant if one.reason != "newer"] if delete else []
        deleted = list(compress(doomed, delete_objects(s3, doomed))) if doomed else []
        found.deleted_count += len(deleted)
        found.deleted_bytes += sum(one.byte_count for one in deleted)
        found.renewed_count += len(doomed) - len(deleted)
        progress(found)
    return found


def _examined(settings: S3Settings, found: Found, ring: EnvelopeRing | None) -> Iterator[list[Examined]]:
    """``ring``: the keys that open envelopes, where all bytes are read. None: headers are."""
    for listed, others in pages(settings):
        found.foreign_count += others
        for start in range(0, len(listed), PAGE_COUNT):
            yield examine(settings, listed[start : start + PAGE_COUNT], whole=ring is not None, ring=ring)


def render(found: Found, now_s: float, *, is_verified: bool) -> Group:
    """Draw the counts for people."""
    table = Table("tenant", "model", "kind", "chunks", "bytes", "newest", "oldest")
    for row in sorted(found.rows.values(), key=lambda row: -row.byte_count):
        ages = (age_of(now_s - row.newest_s), age_of(now_s - row.oldest_s))
        model = cell(f"{row.model_id} {row.model}".strip())
        table.add_row(row.tenant, model, row.kind, f"{row.chunk_count:,}", format_bytes(row.byte_count), *ages)
    lines = [f"{found.object_count:,} objects, {format_bytes(found.byte_count)}"]
    how = "all bytes" if is_verified else "headers and lengths; --verify reads all bytes"
    damaged = ", ".join(f"{count:,} {reason}" for reason, count in sorted(found.damaged.items()))
    none = "none" if found.is_all_checked or not is_verified else "none of what was checked"
    lines.append(f"damaged: {damaged or none} (by {how})")
    if found.unopened_count:
        lines.append(f"not checked (sealed with a key that this configuration does not have): {found.unopened_count:,}")
    if found.newer_count:
        lines.append(f"written by a newer release: {found.newer_count:,}, left alone")
    if found.archived_count:
        lines.append(f"moved to an archive, and not read: {found.archived_count:,}")
    if found.unread_count:
        lines.append(f"too large to be read whole, headers checked: {found.unread_count:,}")
    if found.foreign_count:
        lines.append(f"no chunks: {found.foreign_count:,}, left alone")
    if found.renewed_count:
        lines.append(f"stored anew meanwhile: {found.renewed_count:,}, left alone")
    return Group(table, *map(Text, lines))


def with_progress(work: Callable[[Callable[[Found], None]], Found]) -> Found:
    """Do the work, and show its progress on the error output."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task("scanning")

        def tell(found: Found) -> None:
            done = f"{found.object_count:,} objects, {format_bytes(found.byte_count)}"
            shown.update(task, description=f"{done}, {found.deleted_count:,} deleted" if found.deleted_count else done)

        return work(tell)
