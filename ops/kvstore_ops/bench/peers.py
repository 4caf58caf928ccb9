"""peers: a cache of 256 MiB stored, looked up and fetched by kvstore, LMCache's daemon and Mooncake's store, in turns.

Each product has an environment of its own: KVSTORE_BENCH_LMCACHE and KVSTORE_BENCH_MOONCAKE name their directories, and
pip makes one that is missing. The table says why a product is not in it. All run on this machine's processors, through
memory that they share with their client, or TCP on loopback where a product has nothing else.

A store of ours and of Mooncake's ends when all of it can be fetched, LMCache's with its answer, which may come before.
A fetch goes from the server's memory into memory of the client that was
there before: tensors (kvstore), pages (LMCache), registered memory (Mooncake). The bytes that the peers fetch are
compared after the time was taken.
"""

from __future__ import annotations

import os
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError, Unavailable
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench import lmcache_peer, mooncake_peer
from kvstore_ops.bench.peer import LMCACHE, LMCACHE_PACKAGES, Daemon, Program, environment, free_port
from kvstore_ops.bench.result import Result, note, quartiles, show

MOONCAKE, MOONCAKE_PACKAGES = "KVSTORE_BENCH_MOONCAKE", ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy")
LMCACHE_GB = 3
CHUNKS = {"full": 8, "quick": 8, "tiny": 1}
CHUNK_BYTES = 32 << 20
RUNS = {"full": 30, "quick": 10, "tiny": 1}
WORDS = ("store", "lookup", "fetch")
Seconds = dict[str, list[float]]


class Ours:
    """kvstore's side. A store's number seeds its tokens."""

    def __init__(self, client: Any, count: int) -> None:
        self._client = client
        self._count = count
        self._spec = shared.geometry("quick")
        self._source, self._target = (shared.tensors(self._spec, count) for _ in range(2))

    def do(self, what: str, name: str) -> float:
        """Do a command as a peer's program does."""
        tokens = shared.random_tokens(self._count, 1000 + int(name))
        if what == "store":
            return shared.timed(lambda: self._client.store(self._spec, tokens, self._source).wait())
        found: list[int] = []
        if what == "fetch":
            took = shared.timed(
                lambda: found.append(self._client.fetch(self._spec, tokens, into=self._target).token_count)
            )
        else:
            took = shared.timed(lambda: found.append(self._client.lookup(self._spec, tokens).prefix_token_count))
        assert found == [self._count], found
        return took


@contextmanager
def lmcache(directory: Path, chunk_count: int) -> Iterator[Program]:
    """Run LMCache's daemon, and yield its client's program."""
    python = environment(LMCACHE, LMCACHE_PACKAGES)
    port, http_port = free_port(), free_port()
    variables = {"LMCACHE_TRACK_USAGE": "false", "OMP_NUM_THREADS": "2"}
    words = (
        f"server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http_port} "
        f"--l1-size-gb {LMCACHE_GB} --no-l1-use-lazy --eviction-policy LRU --chunk-size {shared.CHUNK_TOKENS} "
        "--disable-observability"
    )
    with ExitStack() as stack:
        command = [str(python), "-P", str(python.parent / "lmcache"), *words.split()]
        stack.callback(Daemon(command, http_port, variables, directory / "lmcache-server").close)
        tokens = str(chunk_count * shared.CHUNK_TOKENS)
        command = [str(python), "-P", str(lmcache_peer.__file__), str(port), str(http_port), tokens]
        program = Program(command, variables, log=directory / "lmcache-client")
        stack.callback(program.close)
        yield program


@contextmanager
def mooncake(directory: Path, chunk_count: int) -> Iterator[Program]:
    """Run Mooncake's master and the process that owns the memory, and yield its client's program."""
    python = environment(MOONCAKE, MOONCAKE_PACKAGES)
    place = Path(sysconfig.get_path("platlib", vars={"platbase": str(python.parents[1])})) / "mooncake"
    libraries = f"{place}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    variables = {"LD_LIBRARY_PATH": libraries, "MC_LOG_LEVEL": "ERROR"}
    port = free_port()
    words = f"--rpc_address=127.0.0.1 --rpc_port={port} --metrics_host=127.0.0.1 --metrics_port={free_port()}"
    with ExitStack() as stack:
        command = [str(place / "mooncake_master"), *words.split()]
        stack.callback(Daemon(command, port, variables, directory / "mooncake-master").close)
        program = str(mooncake_peer.__file__)
        for role, sizes in (("segment", []), ("client", [str(chunk_count), str(CHUNK_BYTES)])):
            command = [str(python), "-P", program, role, str(port), str(free_port()), *sizes]
            last = Program(command, variables, log=directory / f"mooncake-{role}")
            stack.callback(last.close)
        yield last


def turn(sides: dict[str, Any], number: int, took: dict[str, Seconds]) -> None:
    """Let each side store a new cache, look it up and fetch it; another side begins each time."""
    names = list(sides)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        for what in WORDS:
            took[name][what].append(sides[name].do(what, str(number)))


def measured(scale: str) -> tuple[dict[str, Seconds], dict[str, str]]:
    """Return each side's seconds, after a warm-up, and why others are missing. Raises Unavailable without any peer."""
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-peers-")))
        others: dict[str, Any] = {}
        for name, begin in (("LMCache", lmcache), ("Mooncake", mooncake)):
            try:
                others[name] = stack.enter_context(begin(directory, CHUNKS[scale]))
            except KVStoreError as error:
                missing[name] = error.message
                note(f"peers: without {name}: {error.message}")
        if not others:
            raise Unavailable("; ".join(missing.values()))
        _, client = stack.enter_context(shared.ready("quick"))
        sides = {"kvstore": Ours(client, CHUNKS[scale] * shared.CHUNK_TOKENS), **others}
        took: dict[str, Seconds] = {}
        for number in range(-2, RUNS[scale]):
            if number <= 0:  # the first rounds warm up
                took = {name: {what: [] for what in WORDS} for name in sides}
            turn(sides, number + 2, took)
            note(f"peers: round {number + 1} of {RUNS[scale]}")
    return took, missing


def _cells(took: dict[str, Seconds], what: str, byte_count: int) -> str:
    """Return what each side took for one command, the first side's time over it beside."""
    cells = []
    for name, seconds in took.items():
        middle = statistics.median(seconds[what])
        cell = f"{name} {middle * 1e3:.2f} ms" + ("" if what == "lookup" else f", {byte_count / middle / 1e9:.2f} GB/s")
        if name != "kvstore":
            cell += f" ({_ratio(took, name, what):.2f}x ours)"
        cells.append(cell)
    return "\n".join(cells)


def _ratio(took: dict[str, Seconds], name: str, what: str) -> float:
    """Return a peer's time over ours, the median of the rounds."""
    pairs = zip(took[name][what], took["kvstore"][what], strict=True)
    return statistics.median(theirs / mine for theirs, mine in pairs)


def run(scale: str) -> Result:
    """Measure all. ``ratio``: the time of the faster peer's fetch over ours, round by round."""
    took, missing = measured(scale)
    byte_count = CHUNKS[scale] * CHUNK_BYTES
    peers = [name for name in took if name != "kvstore"]
    faster = min(peers, key=lambda name: _ratio(took, name, "fetch"))
    ours, theirs = took["kvstore"]["fetch"], took[faster]["fetch"]
    ratios = [each / mine for each, mine in zip(theirs, ours, strict=True)]
    show(
        f"peers: {byte_count >> 20} MiB, {len(ours)} rounds",
        [
            *((what, _cells(took, what, byte_count)) for what in WORDS),
            *((f"without {name}", reason) for name, reason in missing.items()),
        ],
    )
    conditions: dict[str, Any] = {
        "scale": scale, "bytes": byte_count, "processors": os.cpu_count(), "missing": missing, "faster": faster,
        "peers": [LMCACHE_PACKAGES[0], MOONCAKE_PACKAGES[0]],
    }  # fmt: skip
    for name, seconds in took.items():
        for what in WORDS:
            conditions[f"{name.lower()}_{what}_s"] = statistics.median(seconds[what])
    return Result(
        name="peers", value=byte_count / statistics.median(ours), unit="B/s",
        limit=byte_count / statistics.median(theirs), ratio=statistics.median(ratios), target="none", met=True,
        runs=len(ours), spread=quartiles(ratios), conditions=conditions,
    )  # fmt: skip
