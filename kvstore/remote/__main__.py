"""The remote plane's process. It reads its orders as one line of JSON on standard input, a later log level as another,
and ends when that input is closed. Its only line on standard output tells its port, or the error that keeps it from
listening."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError, Unavailable
from kvstore.remote.certificates import Certificates
from kvstore.remote.door import Door
from kvstore.remote.node import Node
from kvstore.remote.renewal import RenewedFiles, keep_renewing
from kvstore.remote.tokens import AccessTokens, TokenFile
from kvstore.seams import SystemClock
from kvstore.seams.scheduler import start_thread
from kvstore.telemetry import configure_logging, set_log_level

PR_SET_DUMPABLE = 4


def main() -> int:
    """Serve until standard input ends."""
    orders = json.loads(sys.stdin.readline() or "{}")
    if not orders:
        return 0
    configure_logging(orders["log_level"], orders["log_format"])
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        asyncio.run(_serve(orders))
    except KVStoreError as error:
        _say({"status": error.status, "message": error.message})
        return 1
    return 0


async def _serve(orders: dict[str, Any]) -> None:
    files = [TokenFile(each["name"], Path(each["token_file"]), each["setting"]) for each in orders["tenants"]]
    pems = [orders[name] for name in ("certificate_file", "key_file", "client_ca_file")]
    loop = asyncio.get_running_loop()

    def renew_tokens(file: TokenFile) -> None:
        tokens.read_again(file)
        loop.call_soon_threadsafe(door.end_gone)

    renewed = [  # made before the files are read: what changes meanwhile is read again
        *(RenewedFiles(each.setting, [each.path], partial(renew_tokens, each)) for each in files),
        RenewedFiles("certificates", map(Path, filter(None, pems)), lambda: certificates.read_again()),
    ]
    tokens = AccessTokens(files)
    certificates = Certificates(*pems)
    nodes = {each["name"]: Node(each["name"], Path(each["socket_directory"])) for each in orders["tenants"]}
    door = Door(
        tokens, nodes, message_bytes=orders["message_bytes"], stream_count_max=orders["stream_count_max"],
        stall_s=orders["stall_s"], connection_count_max=orders["connection_count_max"],
        call_count_max=orders["call_count_max"],
    )  # fmt: skip
    try:
        port = door.listen(orders["address"], certificates.credentials)
    except Unavailable:
        certificates.check()  # gRPC says the same of these as of an address that is taken
        raise
    await door.server.start()
    _say({"port": port})
    start_thread(_obey_the_sidecar, "stdin")
    async with asyncio.TaskGroup() as group:
        group.create_task(keep_renewing(renewed, SystemClock()))
        await door.server.wait_for_termination()


def _obey_the_sidecar() -> None:
    """Log at the levels that come on standard input. End this process at once when it is closed: clients see the same
    as after a crash, which they can handle."""
    try:
        for line in sys.stdin:
            set_log_level(json.loads(line)["log_level"])
    finally:
        os._exit(0)


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201 - the sidecar reads it


if __name__ == "__main__":
    sys.exit(main())
