"""Ceph's RADOS gateway, a real S3 server, on loopback: one monitor, one OSD whose objects are in memory, one gateway.

    python -m tests.fakes.rados_gateway make test-s3          runs a command with it, and ends it by its processes' ids
    KVSTORE_TEST_CEPH_ROOT=/opt/ceph                          where packages were unpacked; without it, as installed

The packages of a distribution are enough (Debian 12: radosgw, ceph-mon, ceph-osd and what they need, 350 MB unpacked);
none of them has to be installed, none of it needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.tiers.redis.embedded import dying_with_us
from tests.fakes.s3_server import ENDPOINT, KEYS, STRANGER
from tests.ports import free_port

ROOT = "KVSTORE_TEST_CEPH_ROOT"
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")
START_S_MAX = 120.0
MEMORY_BYTES = 4 << 30
USER = KEYS
STRANGER_KEYS = {"AWS_ACCESS_KEY_ID": "strange-key", "AWS_SECRET_ACCESS_KEY": "strange-secret-that-no-log-may-show"}
SETTINGS = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
mon initial members = a
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd max object size = 1073741824
osd class dir = {libraries}/rados-classes
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 2
mon data = {place}/mon
osd data = {place}/osd
run dir = {place}
log file = {place}/$name.log
admin socket = {place}/$name.sock
keyring = {place}/keyring
rgw data = {place}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw dynamic resharding = false
rgw enable usage log = false
rgw run sync thread = false
rgw crypt require ssl = false
rgw crypt s3 kms backend = testing
rgw crypt s3 kms encryption keys = a-key=dGVzdGluZy1rZXktb2YtMzItYnl0ZXMtb2YtdGV4dCE=
"""


def lacking() -> str:
    """What this machine has not; empty: a gateway can be started."""
    missing = [name for name in PROGRAMS if not _program(name)]
    return f"no {', '.join(missing)} on the PATH or under {ROOT}" if missing else ""


def _program(name: str) -> str | None:
    root = os.environ.get(ROOT)
    return shutil.which(name, path=f"{root}/usr/bin" if root else None)


class RadosGateway:
    """Started when it is made. ``url``: where it listens; ``USER`` may make buckets, ``STRANGER_KEYS`` are another's.
    Raises RuntimeError with what the last program said."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self.place = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-rgw-")))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        root = os.environ.get(ROOT, "")
        self._libraries = f"{root}/usr/lib/x86_64-linux-gnu"
        self._environment = {**os.environ, "CEPH_CONF": f"{self.place}/ceph.conf"}
        if root:
            self._environment["LD_LIBRARY_PATH"] = (
                f"{self._libraries}:{self._libraries}/ceph:{root}/lib/x86_64-linux-gnu"
            )
            self._environment["PYTHONPATH"] = f"{root}/usr/lib/python3/dist-packages"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        place, fsid, mon_port = self.place, uuid.uuid4(), free_port()
        text = SETTINGS.format(
            fsid=fsid, mon_port=mon_port, place=place, port=self.port, libraries=self._libraries,
            memory_bytes=MEMORY_BYTES,
        )  # fmt: skip
        (place / "ceph.conf").write_text(text)
        (place / "keyring").touch(0o600)
        for name in ("mon", "osd", "rgw"):
            (place / name).mkdir()
        self._do(
            "monmaptool", "--create", "--fsid", str(fsid), "--addv", "a", f"[v2:127.0.0.1:{mon_port}]",
            f"{place}/monmap",
        )  # fmt: skip
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", f"{place}/monmap", "--keyring", f"{place}/keyring")
        self._run("ceph-mon", "-i", "a", "-f")
        osd = str(uuid.uuid4())
        self._do("ceph", "--connect-timeout", "30", "osd", "new", osd)
        self._do("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        self._run("ceph-osd", "-i", "0", "-f")
        for name, keys in (("tests", USER), ("stranger", STRANGER_KEYS)):
            self._do(
                "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}",
                f"--access-key={keys['AWS_ACCESS_KEY_ID']}", f"--secret-key={keys['AWS_SECRET_ACCESS_KEY']}",
            )  # fmt: skip
        self._run("radosgw", "-n", "client.admin", "-f")
        until_s = time.monotonic() + START_S_MAX
        while not self._answers():
            assert time.monotonic() < until_s, self._said("client.admin")
            time.sleep(0.05)

    def _command(self, name: str, words: tuple[str, ...]) -> list[str]:
        program = _program(name)
        assert program is not None, lacking()
        return [*(["/usr/bin/python3"] if name == "ceph" else []), program, *words]

    def _do(self, name: str, *words: str) -> None:
        done = subprocess.run(
            self._command(name, words), env=self._environment, capture_output=True, text=True, timeout=START_S_MAX
        )
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(words)}: {done.stderr[-2000:]}")

    def _run(self, name: str, *words: str) -> None:
        with (self.place / f"{name}.out").open("ab") as out:
            command = [*dying_with_us(), *self._command(name, words)]
            running = subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)
        self._ends.callback(running.wait)
        self._ends.callback(running.kill)

    def _said(self, name: str) -> str:
        file = self.place / f"{name}.log"
        return file.read_text(errors="replace")[-2000:] if file.exists() else "nothing"

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=2).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Its processes, by their ids, the last first, and its directory. Idempotent."""
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def main(command: Sequence[str]) -> int:
    """The command's status. Where another server is named, or no gateway can be started, it runs without one."""
    reason = f"{ENDPOINT} names a server" if ENDPOINT in os.environ else lacking()
    with ExitStack() as ends:
        environment = dict(os.environ)
        if reason:
            print(f"no gateway is started: {reason}", file=sys.stderr)
        else:
            gateway = ends.enter_context(RadosGateway())
            environment |= {**USER, ENDPOINT: gateway.url, STRANGER: ":".join(STRANGER_KEYS.values())}
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
