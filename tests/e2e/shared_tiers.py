"""A server with two shared tiers, objects in directories that other servers use, too: "redis" before "s3".

    python -m tests.e2e.shared_tiers --state-directory D --socket-directory R --capacity "1 MiB" --nvme "2 MiB" \\
        --shared S
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from kvstore_ops.sidecar import Sidecar

from kvstore.config import Settings, load
from kvstore.server.app import serve
from kvstore.server.tiers import TIERS, Builder, Tiers
from kvstore.server.world import TierOwner, World
from kvstore.spec import Tier
from kvstore.tiers import SharedUse, WritePolicy
from tests.e2e.third_tier import FLAGS
from tests.fakes import ObjectSettings, ObjectTier, Switches

CAPACITY_BYTES = 1 << 30
LOOKUP_S = 1.0
"""More than a directory on a busy machine takes."""
KINDS = {"redis": Tier.REDIS, "s3": Tier.S3}
"""By their names, the fastest first."""


class Shared:
    """What the servers share: for each tier a directory, what it is to do wrong, and when it is written to."""

    def __init__(self, directory: Path, **write: str) -> None:
        """``write``: by the name of a tier, for servers that start from now on."""
        self.directory = directory
        for name, policy in write.items():
            (directory / f"{name}.write").write_text(policy)

    def write(self, name: str) -> WritePolicy:
        """When one tier is written to."""
        path = self.directory / f"{name}.write"
        return WritePolicy(path.read_text()) if path.exists() else WritePolicy.BACK

    def settings(self, name: str) -> ObjectSettings:
        """Of one tier."""
        return ObjectSettings(
            directory=self.directory / name, name=name, kind=KINDS[name], capacity_bytes=CAPACITY_BYTES,
            switches=self.directory / f"{name}.switches",
        )  # fmt: skip

    def switches(self, name: str) -> Switches:
        """For every server at once."""
        return Switches(self.settings(name).switches)

    def turn_off(self) -> None:
        """All of them are well."""
        for name in KINDS:
            self.switches(name).turn_off()

    def objects(self, name: str) -> list[Path]:
        """Those that are whole."""
        return [each for each in (self.directory / name).glob("*") if not each.suffix]

    def drop_all(self, *names: str) -> None:
        """As engines may at any time."""
        for name in names:
            for path in self.objects(name):
                path.unlink()


class SharingSidecar(Sidecar):
    """One node. It listens on TCP, too. 16 chunks of 64 KiB have room in its memory, a few times as many in NVMe,
    which has files of several sizes."""

    program = ("tests.e2e.shared_tiers",)

    def __init__(self, shared: Shared) -> None:
        own = {
            "CONTROLLER__DEADLINE_S": "5", "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0",
            "TIERS__NVME__REGION_BYTES": "1 MiB",
        }  # fmt: skip
        super().__init__(
            "--capacity", "1 MiB", "--shared", str(shared.directory), nvme="4 MiB", plane="remote",
            environment={**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}},
        )  # fmt: skip


def build(shared: Shared, name: str, _settings: Settings, _world: World, _owner: TierOwner) -> SharedUse:
    """A node's way to one of them."""
    return SharedUse(tier=ObjectTier(shared.settings(name)), lookup_s_max=LOOKUP_S, write=shared.write(name))


def main(arguments: list[str]) -> int:
    """Serve until told to stop."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    shared = Shared(Path(given.pop("--shared")))
    builders = tuple(Builder(name, "server.state_directory", partial(build, shared, name)) for name in KINDS)
    flags: dict[str, object] = {FLAGS[name]: value for name, value in given.items()}
    return serve(load(None, os.environ, flags), Tiers(local=TIERS.local, shared=builders))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
