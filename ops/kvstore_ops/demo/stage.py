"""Runs the scenes, each in its own process, and says whether the demo kept its promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from kvstore_client import connect
from rich.console import Console

from kvstore.errors import Unavailable
from kvstore_ops.demo import reuse
from kvstore_ops.demo.scene import Outcome
from kvstore_ops.demo.show import picture, table
from kvstore_ops.sidecar import Sidecar

PICTURE = Path("kvstore-demo.png")
CAPACITY, NVME = "512 MiB", "1 GiB"
SPEED_UP_MIN = 3.0
QUIET = {"KVSTORE__POLICY__SCRUB_BYTES_PER_S": "0", "KVSTORE__POLICY__CANARY_INTERVAL_S": "0"}
"""What the sidecar reads from the device by itself is off: all that it reads is the prompt's."""


def perform(address: str, name: str, console: Console) -> Outcome:
    """One engine process. Raises Unavailable with its last words when it fails."""
    command = [sys.executable, "-m", "kvstore_ops.demo.scene", address, name]
    outcome: Outcome | None = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # a pipe that nobody empties would hold it up
        with (
            console.status(f"{name}: starting an engine") as status,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                if "stage" in message:
                    status.update(f"{name}: {message['stage']}")
                    if not console.is_terminal:
                        console.print(f"  {name}: {message['stage']}")
                else:
                    outcome = Outcome(**message["outcome"])
        log.seek(0)
        words = log.read()
    if outcome is None:
        raise Unavailable(f"the {name} scene failed: {words[-800:]}")
    return outcome


def device_bytes(sidecar: Sidecar) -> tuple[int, str]:
    """What the sidecar has read from the device since it started, and who says so: the kernel, or where it does not
    tell, the tier itself."""
    count = sidecar.device_read_bytes()
    if count is not None:
        return count, "the kernel's I/O account of the sidecar's process"
    with connect(sidecar.address) as client:
        return sum(tier.read_bytes for tier in client.stats().tiers), "the tier's own statistics"


def act(sidecar: Sidecar, name: str, console: Console) -> Outcome:
    """One scene, and what the sidecar read from the device during it."""
    before, _ = device_bytes(sidecar)
    outcome = perform(sidecar.address, name, console)
    after, _ = device_bytes(sidecar)
    return replace(outcome, sidecar_pid=sidecar.pid, device_bytes=after - before)


def main() -> int:
    """0 when the later scenes reused the prompt and said the same tokens; 1 otherwise."""
    console = Console()
    console.print("kvstore demo: one prompt of 4,160 tokens, asked by three engine processes in turn")
    with Sidecar("--capacity", CAPACITY, nvme=NVME, environment={**os.environ, **QUIET}) as sidecar:
        console.print(f"  sidecar: pid {sidecar.pid}, {sidecar.address}")
        with console.status("sidecar: pre-faulting its arena"):
            sidecar.wait_prefaulted()
        outcomes = [act(sidecar, name, console) for name in ("cold", "warm")]
        sidecar.stop()
        sidecar.start()
        with console.status("sidecar: started again, pre-faulting its arena"):
            sidecar.wait_prefaulted()
        outcomes.append(act(sidecar, "restarted", console))
        source = device_bytes(sidecar)[1]
        warm, restarted = outcomes[-2:]
        console.print(f"  restarted: sidecar pid {warm.sidecar_pid} -> {restarted.sidecar_pid}, "
                      f"engine pid {warm.pid} -> {restarted.pid}")  # fmt: skip
        console.print(table(outcomes, source))
        picture(outcomes, PICTURE)
        console.print(f"timelines: {PICTURE}")
        with connect(sidecar.address) as client:
            reuse.perform(client, console)
    return verdict(outcomes, console)


def verdict(outcomes: list[Outcome], console: Console) -> int:
    """Say plainly when the promise was not kept."""
    cold, *others = outcomes
    for each in others:
        if each.tokens != cold.tokens:
            console.print(f"[red]{each.name}: other tokens than cold: {each.tokens} against {cold.tokens}")
            return 1
        if not each.reused_token_count:
            console.print(f"[red]{each.name}: nothing was reused")
            return 1
        if each.name == "restarted":
            _judge_device(each, cold, console)
    return 0


def _judge_device(restarted: Outcome, cold: Outcome, console: Console) -> None:
    """Whether the device really served, and fast enough to be worth it."""
    if restarted.tier != "nvme" or restarted.device_bytes < restarted.fetched_bytes:
        console.print(
            f"[red]restarted: {restarted.device_bytes:,} bytes were read from the device for a cache of "
            f"{restarted.fetched_bytes:,}, which came from {restarted.tier}"
        )
    if restarted.best_ttft_s * SPEED_UP_MIN > cold.best_ttft_s:
        console.print(
            f"[red]restarted: the first token took {restarted.best_ttft_s:.2f} s, cold {cold.best_ttft_s:.2f} s: "
            f"not {SPEED_UP_MIN:.0f} times less"
        )
