"""A server with tiers that the service does not know: a local one, files in its state directory, and a shared one,
objects in any directory.

    python -m tests.e2e.third_tier --state-directory D --socket-directory R --capacity "1 MiB" --nvme "2 MiB" \\
        --tiers nvme,files --objects O
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvstore_ops.sidecar import Sidecar

from kvstore.config import Settings, load
from kvstore.server import serve
from kvstore.server.tiers import TIERS, Builder, Tiers
from kvstore.server.world import World
from kvstore.spec import Tier
from kvstore.tiers import LocalTier, SharedTier
from tests.fakes import FilesSettings, FilesTier, ObjectSettings, ObjectTier, Switches

CAPACITY_BYTES = 64 << 20
KIND = Tier.S3
"""What replies and events call the files: a number that no other local tier has."""
LOOKUP_S_MAX = 1.0
FLAGS = {
    "--state-directory": "server.state_directory",
    "--socket-directory": "server.socket_directory",
    "--capacity": "arena.capacity_bytes",
    "--nvme": "tiers.nvme.capacity_bytes",
}


def build_files(settings: Settings, _world: World, _owner: str) -> LocalTier:
    """Its settings follow from where the server keeps its state."""
    home = settings.server.state_directory
    return FilesTier(
        FilesSettings(directory=home / "files", kind=KIND, capacity_bytes=CAPACITY_BYTES, switches=home / "switches")
    )


def objects_in(directory: Path) -> Builder[tuple[SharedTier, float]]:
    """What several servers share; its switches lie beside it."""
    settings = ObjectSettings(directory=directory, switches=directory.with_suffix(".switches"))
    return Builder(settings.name, "--objects", lambda *_: (ObjectTier(settings), LOOKUP_S_MAX))


BUILDERS = {each.name: each for each in (*TIERS.local, Builder("files", "server.state_directory", build_files))}


class ThirdTierSidecar(Sidecar):
    """``tiers``: the names of the local ones, the fastest first, as in "nvme,files"; ``objects``: where the shared one
    is, if there is one."""

    program = ("tests.e2e.third_tier",)

    def __init__(self, tiers: str, *, nvme: str = "2 MiB", objects: Path | None = None) -> None:
        own = {"CONTROLLER__DEADLINE_S": "1", "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0"}
        flags = ["--capacity", "1 MiB", "--tiers", tiers, *(["--objects", str(objects)] if objects else [])]
        super().__init__(
            *flags, nvme=nvme, environment={**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}
        )

    @property
    def switches(self) -> Switches:
        """Of the files."""
        return Switches(self.directory / "switches")


def main(arguments: list[str]) -> int:
    """Serve until told to stop."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    local = tuple(BUILDERS[name] for name in given.pop("--tiers").split(","))
    shared = tuple(objects_in(Path(each)) for each in (given.pop("--objects", ""),) if each)
    flags: dict[str, object] = {FLAGS[name]: value for name, value in given.items()}
    return serve(load(None, os.environ, flags), Tiers(local=local, shared=shared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
