"""footprint: the server's private memory, and the size of an installation without torch."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Goal, Result, judged_by, show

SERVER_TARGET_MIB, INSTALL_TARGET_MIB = 150, 300


def anonymous_mib(pid: int) -> float:
    """Return RssAnon: a process's private memory, without the arena's shared pages."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


def install_mib() -> float:
    """Return the size of the files of kvstore, its core dependencies and their dependencies; extras are not counted."""
    seen: set[str] = set()
    waiting = ["kvstore"]
    total = 0
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in package.requires or ():
            if "extra ==" not in requirement and "python_version <" not in requirement:
                waiting.append(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
        for file in package.files or ():
            path = Path(str(file.locate()))
            total += path.stat().st_size if path.is_file() else 0
    return total / (1 << 20)


def run(scale: str) -> Result:
    """Measure the server and its byte movers after 256 MiB were stored and fetched."""
    spec = shared.geometry(scale)
    count = shared.CHUNKS[scale] * shared.CHUNK_TOKENS
    tokens, source = shared.random_tokens(count, 5), shared.tensors(spec, count)
    with shared.ready(scale) as (sidecar, client):
        client.store(spec, tokens, source).wait()
        assert client.fetch(spec, tokens, into=source).token_count == count
        server = anonymous_mib(sidecar.pid)
        movers = [anonymous_mib(pid) for pid in sidecar.mover_pids()]
    install, whole = install_mib(), server + sum(movers)
    show(
        "footprint",
        [
            ("server and its byte movers, RssAnon", f"{whole:.0f} MiB (target {SERVER_TARGET_MIB})"),
            ("  the server", f"{server:.0f} MiB"),
            *(
                (f"  byte mover {number}, pages shared with it included", f"{each:.0f} MiB")
                for number, each in enumerate(movers)
            ),
            ("installation without torch", f"{install:.0f} MiB (target {INSTALL_TARGET_MIB})"),
        ],
    )
    return Result(
        name="footprint", value=whole, unit="MiB", limit=SERVER_TARGET_MIB, ratio=whole / SERVER_TARGET_MIB,
        **judged_by(
            Goal("MiB of the server", whole, SERVER_TARGET_MIB, is_upper=True),
            Goal("MiB installed", install, INSTALL_TARGET_MIB, is_upper=True),
        ), runs=1, spread=(whole, whole),
        conditions={"scale": scale, "install_mib": install},
    )  # fmt: skip
