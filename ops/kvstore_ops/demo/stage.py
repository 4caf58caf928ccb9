"""Runs the scenes, each in its own process, and checks that the demo kept its promise."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore_client import connect
from rich.console import Console

from kvstore.errors import Unavailable
from kvstore_ops.demo import real, reuse
from kvstore_ops.demo.nodes import settings_of, shared_redis, show_places, wait_shared
from kvstore_ops.demo.progress import progress
from kvstore_ops.demo.scene import CONTEXT_TOKENS, QUESTION_TOKENS, Outcome
from kvstore_ops.demo.show import picture, table
from kvstore_ops.demo.text import prompt_tokens
from kvstore_ops.sidecar import Sidecar
from kvstore_ops.tier_words import tier_words

PICTURE = Path("kvstore-demo.png")
CAPACITY, NVME = "512 MiB", "1 GiB"
SPEED_UP_MIN = 3.0
SIGN_S = 5
"""Seconds of a step after which the demo shows that it still runs."""
ANOTHER_NODE = "node b"


def perform(address: str, name: str, console: Console) -> Outcome:
    """Run one scene in an engine process. Raises Unavailable with the end of its error output when it fails."""
    command = [sys.executable, "-m", "kvstore_ops.demo.scene", address, name]
    outcome: Outcome | None = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # a full pipe would block the engine process
        with (
            progress(console, f"{name}: starting an engine") as tell,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, bufsize=0) as process,
        ):
            try:
                for message in _messages(process):
                    if "step" in message:
                        tell(f"{name}: {message['step']}")
                    else:
                        outcome = Outcome(**message["outcome"])
            except BaseException:
                process.kill()  # who leaves this context waits for the process
                raise
        log.seek(0)
        words = log.read()
    if outcome is None:
        raise Unavailable(f"the {name} scene failed: {words[-800:]}")
    return outcome


def _messages(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what a scene says. While it says nothing, yield its last step every SIGN_S seconds, with the time so
    far."""
    assert process.stdout is not None  # unbuffered: a line that has been read early would not wake select
    step, waited_s = "starting an engine", 0
    while True:
        if not select.select([process.stdout], [], [], SIGN_S)[0]:
            waited_s += SIGN_S
            yield {"step": f"{step}: {waited_s} s so far"}
            continue
        line = process.stdout.readline()
        if not line:
            return
        message = json.loads(line)
        step, waited_s = message.get("step", step), 0
        yield message


def device_bytes(sidecar: Sidecar) -> tuple[int, str]:
    """Return the bytes that the sidecar has read from the device since it started, and the name of the counter: the
    kernel's, or the tier's own when the kernel's cannot be read."""
    count = sidecar.device_read_bytes()
    if count is not None:
        return count, "the kernel's I/O account of the sidecar's process"
    with connect(sidecar.address) as client:
        return sum(tier.read_bytes for tier in client.stats().tiers), "the tier's own statistics"


def act(sidecar: Sidecar, name: str, console: Console) -> Outcome:
    """Run one scene, and add the bytes that the sidecar read from the device during it."""
    before, _ = device_bytes(sidecar)
    outcome = perform(sidecar.address, name, console)
    after, _ = device_bytes(sidecar)
    return replace(outcome, sidecar_pid=sidecar.pid, device_bytes=after - before)


def main() -> int:
    """Run the demo. Return 0 when the later scenes reused the prompt and gave the same tokens; 1 otherwise. SIGTERM
    and a terminal that closes end it as an interrupt does: what it started ends, and its directories are removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has a process ignore SIGHUP
            signal.signal(number, _end)
    console = Console()
    console.print(
        f"kvstore demo: one prompt of {CONTEXT_TOKENS + QUESTION_TOKENS:,} tokens, asked by engine processes in turn. "
        "It takes 2 to 3 minutes on two idle cores; Ctrl-C ends it and removes what it wrote."
    )
    return _play(console)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _play(console: Console) -> int:
    with shared_redis() as url, Sidecar("--capacity", CAPACITY, nvme=NVME, environment=settings_of("a", url)) as first:
        console.print(f"  sidecar: pid {first.pid}, {first.address}")
        with console.status("sidecar: pre-faulting its arena"):
            first.wait_prefaulted()
        outcomes = [act(first, name, console) for name in ("cold", "warm")]
        first.stop()
        first.start()
        with console.status("sidecar: started again, pre-faulting its arena"):
            first.wait_prefaulted()
        outcomes.append(act(first, "restarted", console))
        source = device_bytes(first)[1]
        warm, restarted = outcomes[-2:]
        console.print(f"  restarted: sidecar pid {warm.sidecar_pid} -> {restarted.sidecar_pid}, "
                      f"engine pid {warm.pid} -> {restarted.pid}")  # fmt: skip
        if url:
            outcomes.append(act_on_another_node(first, url, console))
        else:
            console.print("  no Redis server for this machine is installed: the scene on another node is left out")
        console.print(table(outcomes, source))
        picture(outcomes, PICTURE)
        console.print(f"timelines: {PICTURE}")
        with connect(first.address) as client:
            real.perform(client, console)
            reuse.perform(client, console)
    return verdict(outcomes, console)


def act_on_another_node(first: Sidecar, url: str, console: Console) -> Outcome:
    """Run the scene on another node, for which only the shared Redis has the prompt."""
    wait_shared(first)
    with Sidecar("--capacity", CAPACITY, environment=settings_of("b", url)) as second:
        console.print(f"  another node: sidecar pid {second.pid}, {second.address}")
        with console.status("another node: pre-faulting its arena"):
            second.wait_prefaulted()
        outcome = act(second, ANOTHER_NODE, console)
        show_places(second, prompt_tokens(CONTEXT_TOKENS, QUESTION_TOKENS), console)
    return outcome


def verdict(outcomes: list[Outcome], console: Console) -> int:
    """Return 0 when the demo kept its promise; else print the failure and return 1."""
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
        elif each.name == ANOTHER_NODE and each.tier != "redis":
            console.print(f"[red]{each.name}: the cache came from {tier_words(each.tier)}, not from Redis")
            return 1
    return 0


def _judge_device(restarted: Outcome, cold: Outcome, console: Console) -> None:
    """Print a warning when the device did not serve the restarted scene, or was slow."""
    if restarted.tier != "nvme" or restarted.device_bytes < restarted.fetched_bytes:
        console.print(
            f"[red]restarted: {restarted.device_bytes:,} bytes were read from the device for a cache of "
            f"{restarted.fetched_bytes:,}, which came from {tier_words(restarted.tier)}"
        )
    if restarted.best_ttft_s * SPEED_UP_MIN > cold.best_ttft_s:
        console.print(
            f"[yellow]restarted: right, but slow: the first token came after {restarted.best_ttft_s:.2f} s, cold after "
            f"{cold.best_ttft_s:.2f} s, and at least {SPEED_UP_MIN:.0f} times faster was expected. Other work on this "
            "machine's processors or disk delays the reads: run the demo again when it is idle."
        )
