"""Files that keep what a tenant's service has learned over restarts. Each file is a hint: without it the service learns
anew."""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from kvstore.catalog import Catalog
from kvstore.controller import Parts
from kvstore.controller.prefills import Engines
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.keys import fingerprint
from kvstore.planning.kept import KeptForm, text_of
from kvstore.seams import Clock, Disk, Workers
from kvstore.seams.disk import read_whole, replace_whole
from kvstore.seams.jobs import done
from kvstore.spec import ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import spec_from_message, spec_to_message

SAVE_INTERVAL_S = 60.0
SOON_S = 1.0
"""Seconds between two looks for news that is rare, and would be missed at once after a crash."""
BYTES_MAX = 1 << 20
MODELS_BYTES_MAX = 768 << 10
"""The most bytes of all specs of a tenant in their file: a model of 80 layers takes some 2 KB. Past these, the models
that were not used the longest are left out."""
VERSION = 1
MODELS = KeptForm("kvstore-models", VERSION, "models", "registered models")
_log = logging.getLogger("kvstore.server")


class Learned(Protocol):
    """Knowledge that a file keeps."""

    @property
    def is_changed(self) -> bool:
        """True when the knowledge changed since ``pack`` was last called."""

    def pack(self) -> bytes:
        """Return the knowledge as bytes, which ``unpack`` reads."""

    def unpack(self, data: bytes) -> None:
        """Begin with the knowledge that an earlier start packed. Raises InvalidRequest saying what is wrong with it."""


class KeptModels:
    """The specs of a tenant's models. By them the chunks that a device kept have names and sizes from the start on, so
    that routers hear of them and operators can act on them before an engine comes. Load it when the tiers are in use.
    """

    def __init__(self, catalog: Catalog, model_count_max: int) -> None:
        """``model_count_max``: the limit of models. Half of it stays free at the start: a model with chunks keeps its
        place, and engines may come with new ones."""
        self._catalog = catalog
        self._count_max = model_count_max // 2
        self._packed: dict[bytes, str] = {}
        """Specs as the file has them, by fingerprint: to pack one takes 0.1 ms, in which the service answers nobody."""

    @property
    def is_changed(self) -> bool:
        return self._packed.keys() != self._catalog.models.keys()

    def pack(self) -> bytes:
        models = sorted(self._catalog.models.values(), key=lambda each: each.used_at, reverse=True)
        self._packed = {each.fingerprint: self._packed.get(each.fingerprint) or _packed(each.spec) for each in models}
        texts: dict[str, str] = {}
        room = MODELS_BYTES_MAX
        for name, packed in self._packed.items():
            room -= len(packed)
            if room < 0:
                break
            texts[name.hex()] = packed
        return MODELS.pack_texts(texts)

    def unpack(self, data: bytes) -> None:
        """Register the models of an earlier start, those that were used last. One that this release refuses, or
        understands as another model, is left out: its engine registers it."""
        found = [(name, packed) for name, packed in MODELS.unpack(data).items() if isinstance(packed, str)]
        for name, packed in reversed(found[: self._count_max]):  # the one used last comes last, as it was
            with suppress(DecodeError, ValueError, InvalidRequest):
                spec = spec_from_message(pb.ModelSpec.FromString(b64decode(packed, validate=True)))
                if fingerprint(spec, spec.kind).hex() == name:
                    self._packed[self._catalog.register(spec).fingerprint] = text_of(packed)


def _packed(spec: ModelSpec) -> str:
    return text_of(b64encode(spec_to_message(spec).SerializeToString()).decode())


class KeptFile:
    """One file. It is read at the start, and written when there is news. ``said``: the name of its content in logs;
    ``interval_s``: seconds between two looks whether there is news."""

    def __init__(
        self, path: Path, disk: Disk, learned: Learned, said: str, interval_s: float = SAVE_INTERVAL_S
    ) -> None:  # fmt: skip
        self.path = path
        self._disk = disk
        self._learned = learned
        self._said = said
        self._interval_s = interval_s
        self._is_owed = False
        """True while there is news that was packed, and is not in the file: nobody could write it."""

    def load(self) -> None:
        """Begin with the knowledge of the last start. A file that cannot be read is left alone, with a warning."""
        try:
            self._learned.unpack(read_whole(self._disk, self.path, BYTES_MAX))
        except FileNotFoundError:
            return
        except (OSError, InvalidRequest) as error:
            reason = error.message if isinstance(error, InvalidRequest) else str(error)
            _log.warning(f"{self._said} of the last start are lost", extra={"path": str(self.path), "reason": reason})

    async def follow(self, clock: Clock, workers: Workers) -> None:
        """Write the file whenever there is news, for ever; where it cannot be written, again every
        ``SAVE_INTERVAL_S``."""
        while True:
            await clock.sleep(SAVE_INTERVAL_S if self._is_owed else self._interval_s)
            if self._has_news:
                try:
                    await done(workers, self._write, self._packed())
                except Unavailable as error:
                    self._warn(error.message)

    def save(self) -> None:
        """Write the file if there is news. Blocks."""
        if self._has_news:
            self._write(self._packed())

    @property
    def _has_news(self) -> bool:
        return self._is_owed or self._learned.is_changed

    def _packed(self) -> bytes:
        self._is_owed = True
        return self._learned.pack()

    def _write(self, data: bytes) -> None:
        try:
            self._disk.make_directory(self.path.parent)
            replace_whole(self._disk, self.path, data)
            self._is_owed = False
        except (OSError, Unavailable) as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        _log.warning(f"{self._said} are not kept", extra={"path": str(self.path), "reason": reason})


def kept_files(directory: Path, disk: Disk, parts: Parts, engines: Engines) -> list[KeptFile]:
    """Return the files of one tenant that are loaded first. ``directory``: the state directory of the service."""
    name = f"{parts.keys.tenant}.json"
    return [
        KeptFile(directory / "rates" / name, disk, parts.meters, "rates of tiers"),
        KeptFile(directory / "served" / name, disk, parts.served, "hours of fetched tokens"),
        KeptFile(directory / "engines" / name, disk, engines, "speeds of engines"),
        KeptFile(directory / "profiles" / name, disk, parts.profiles, "registered profiles"),
    ]


def later_files(directory: Path, disk: Disk, parts: Parts) -> list[KeptFile]:
    """Return the files that are loaded in this order when a tenant's tiers are in use, of whose content they tell."""
    name = f"{parts.keys.tenant}.json"
    return [
        KeptFile(
            directory / "models" / name,
            disk,
            KeptModels(parts.catalog, parts.limits.model_count_max),
            "registered models",
            SOON_S,
        ),
        KeptFile(directory / "pins" / name, disk, parts.pins, "pins", SOON_S),
    ]
