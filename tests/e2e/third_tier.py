"""A server with one more local tier, files in its state directory: what a tier takes that the service does not know.

    python -m tests.e2e.third_tier --state-directory D --socket-directory R --capacity "1 MiB" --nvme "2 MiB" \\
        --tiers nvme,files
"""

from __future__ import annotations

import os
import sys

from kvstore_ops.sidecar import Sidecar

from kvstore.config import Settings, load
from kvstore.server.app import serve
from kvstore.server.tiers import TIERS, Builder, Tiers
from kvstore.server.world import TierOwner, World
from kvstore.spec import Tier
from kvstore.tiers import LocalTier
from tests.fakes import FilesSettings, FilesTier, Switches

CAPACITY_BYTES = 64 << 20
KIND = Tier.S3
"""What replies and events call the files: a number that no other tier of these servers has."""
FLAGS = {
    "--state-directory": "server.state_directory",
    "--socket-directory": "server.socket_directory",
    "--capacity": "arena.capacity_bytes",
    "--nvme": "tiers.nvme.capacity_bytes",
}


def build_files(settings: Settings, _world: World, _owner: TierOwner) -> LocalTier:
    """Its settings follow from where the server keeps its state."""
    home = settings.server.state_directory
    return FilesTier(
        FilesSettings(directory=home / "files", kind=KIND, capacity_bytes=CAPACITY_BYTES, switches=home / "switches")
    )


BUILDERS = {each.name: each for each in (*TIERS.local, Builder("files", "server.state_directory", build_files))}


class ThirdTierSidecar(Sidecar):
    """``tiers``: their names, the fastest first, as in "nvme,files"."""

    program = ("tests.e2e.third_tier",)

    def __init__(self, tiers: str, *, nvme: str = "2 MiB") -> None:
        own = {"KVSTORE__CONTROLLER__DEADLINE_S": "1", "KVSTORE__POLICY__SCRUB_BYTES_PER_S": "0"}
        super().__init__("--capacity", "1 MiB", "--tiers", tiers, nvme=nvme, environment={**os.environ, **own})

    @property
    def switches(self) -> Switches:
        """Of the files."""
        return Switches(self.directory / "switches")


def main(arguments: list[str]) -> int:
    """Serve until told to stop."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    local = tuple(BUILDERS[name] for name in given.pop("--tiers").split(","))
    flags: dict[str, object] = {FLAGS[name]: value for name, value in given.items()}
    return serve(load(None, os.environ, flags), Tiers(local=local))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
