"""The sidecar's control of the remote plane's process: it starts, watches, restarts and ends the process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvstore.config import Settings
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable, from_status
from kvstore.seams import Clock
from kvstore.units import split_address

START_TIMEOUT_S = 30.0
RESTART_PAUSE_S, RESTART_PAUSE_S_MAX = 1.0, 60.0
STOP_TIMEOUT_S = 5.0
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""By default the C library gives memory of a message's size back to the kernel at once, and faults it in anew for the
next message. These limits prevent that."""
QUIET = {"GRPC_VERBOSITY": "ERROR"}
"""By default gRPC logs each handshake that fails: whoever reaches the port, without a token, could fill the disk."""
_log = logging.getLogger("kvstore.remote")


class RemoteDoor:
    """Runs ``python -m kvstore.remote`` as a child, which ends when its standard input is closed."""

    def __init__(self, settings: Settings, tenants: Mapping[str, Settings], clock: Clock) -> None:
        """``tenants``: each tenant's own view of the settings. Does nothing while remote.address is empty. Raises
        InvalidRequest when no tenant has a token file."""
        self._orders = _orders(settings, tenants) if settings.remote.address else {}
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self.address = settings.remote.address

    async def start(self) -> None:
        """Start the process, and return when it listens. Raises the error that it starts with, naming the setting."""
        if not self._orders:
            return
        pipe, environment = asyncio.subprocess.PIPE, {**ALLOCATOR, **QUIET, **os.environ}
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvstore.remote", stdin=pipe, stdout=pipe, env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is for the sidecar alone, which ends this one
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(
                f"remote.address = {self.address}: its process cannot be started ({error}): allow this user more "
                "processes (ulimit -u), or unset it"
            ) from error
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_line({**self._orders, "address": self.address}))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            raise Unavailable(
                f"remote.address = {self.address}: its process did not start within {START_TIMEOUT_S:.0f} s: start "
                "again when the machine is less busy, or unset it"
            ) from None
        reply = json.loads(line or b"{}")
        if "port" not in reply:
            await process.wait()
            raise from_status(reply.get("status", "INTERNAL"), reply.get("message", "the remote plane did not start"))
        host, _ = split_address(self.address, "remote.address")
        self.address = f"[{host}]:{reply['port']}" if ":" in host else f"{host}:{reply['port']}"

    def set_log_level(self, level: str) -> None:
        """Have the process log at this level from now on, over restarts too."""
        if not self._orders:
            return
        self._orders["log_level"] = level
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.write(_line({"log_level": level}))

    async def watch(self) -> None:
        """Start the process again whenever it dies, until ``stop``; less and less often while it does not start: each
        attempt takes a second of a processor, and a line of the log."""
        pause_s = RESTART_PAUSE_S
        while self._process is not None:
            code = await self._process.wait()
            if self._is_stopping:
                return
            _log.error("the remote plane's process died: starting it again", extra={"exit_status": code})
            await self._clock.sleep(pause_s)
            if self._is_stopping:
                return
            try:
                await self.start()
                pause_s = RESTART_PAUSE_S
            except (KVStoreError, ValueError) as error:  # clients on this host are served on in any case
                _log.error("the remote plane does not start", extra={"reason": str(error)})
                pause_s = min(2 * pause_s, RESTART_PAUSE_S_MAX)

    async def stop(self) -> None:
        """End the process. Idempotent."""
        self._is_stopping = True
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _line(orders: Mapping[str, Any]) -> bytes:
    return json.dumps(orders).encode() + b"\n"


def _orders(settings: Settings, tenants: Mapping[str, Settings]) -> dict[str, Any]:
    remote = settings.remote
    served = [
        {
            "name": name, "setting": _token_setting(settings, name), "token_file": own.remote.token_file,
            "socket_directory": str(own.server.socket_directory),
        }
        for name, own in tenants.items() if own.remote.token_file
    ]  # fmt: skip
    if not served:
        raise InvalidRequest(
            f"remote.address = {remote.address}: clients over TCP need a token: set remote.token_file to a file with "
            "one per line, or a tenant's tenants.NAME.token_file",
            setting="remote.address",
        )
    server = settings.server
    return {**asdict(remote), "tenants": served, "log_level": server.log_level, "log_format": server.log_format}


def _token_setting(settings: Settings, name: str) -> str:
    own = settings.tenants.get(name)
    return f"tenants.{name}.token_file" if own is not None and own.token_file else "remote.token_file"
