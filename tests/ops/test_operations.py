"""The ten tasks of docs/operations.md, each command as it stands there, beside a real sidecar with two tenants."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.keys import chain_digests
from kvstore.spec import Durability
from tests.conftest import ROOT
from tests.fakes.redis_server import RedisServer
from tests.ops.command import Done, run
from tests.security.tenancy import client_of, tenants_sidecar
from tests.specs import random_cache, small_spec, tokens_of

PAGE = (ROOT / "docs" / "operations.md").read_text()
COMMANDS = [
    line.partition("  #")[0]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]  # fmt: skip
COUNT = 64
OWNERS = {"chat-7b": "red", "code-7b": "blue", "doc-7b": "blue"}
SPECS = {name: small_spec(model_id=name, weights_digest=f"{number:064x}") for number, name in enumerate(OWNERS)}


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as redis:
        own = {f"KVSTORE__TENANTS__{name}__NVME_CAPACITY_BYTES": "32 MiB" for name in ("RED", "BLUE")}
        shared = {"URL": redis.url, "WRITE": "never", "LOOKUP_S_MAX": "1 s"}
        own |= {f"KVSTORE__TIERS__REDIS__{name}": value for name, value in shared.items()}
        own["KVSTORE__POLICY__SCRUB_BYTES_PER_S"] = "0"  # what is just being looked at is held
        with tenants_sidecar("--capacity", "16 MiB", names=("red", "blue"), **own) as running:
            yield running


def said(done: dict[str, Done], words: str) -> Done:
    """What the one command said that begins so."""
    (found,) = [each for command, each in done.items() if command.startswith(words)]
    return found


def test_every_task_is_done_by_its_commands(sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of(COUNT, 7)
    for name, tenant in OWNERS.items():
        with client_of(sidecar, tenant) as client:
            assert client.store(SPECS[name], tokens, random_cache(SPECS[name], COUNT, 7)).wait(20) is Durability.LOCAL
    (tmp_path / "prompt.json").write_text(json.dumps([int(each) for each in tokens]))
    digest = chain_digests(tokens, SPECS["doc-7b"].chunk_tokens)[1].hex()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSTORE_SOCKET", sidecar.socket_address.removeprefix("unix://"))
    assert len(COMMANDS) > 15
    done: dict[str, Done] = {}
    for command in COMMANDS:
        program, *arguments = shlex.split(command.replace("$DIGEST", digest))
        assert program == "kvstore"
        done[command] = run(*arguments)
        assert done[command].code == 0, (command, done[command])
    assert re.search(r"red.*nvme 48 KiB", done["kvstore status"].out)
    assert re.search(r"chat-7b.* 4 ", done["kvstore models --tenant red"].out)
    for words in ("kvstore evict", "kvstore move", "kvstore drain --tenant blue --tier nvme"):
        dry, real = [each for command, each in done.items() if command.startswith(words) and "--end" not in command]
        assert dry.out.splitlines()[3:] == real.out.splitlines()[3:]  # but for the title
    assert re.search(r"removed .* 4 ", said(done, "kvstore evict --tenant red --model chat-7b --yes").out)
    assert re.search(r"given up.* 4 ", said(done, "kvstore move --tenant blue --model code-7b --to redis --yes").out)
    assert "64" in said(done, "kvstore locate").out
    assert said(done, "kvstore ls").out.count("dram nvme") == 4
    assert digest in said(done, "kvstore show").out.replace("\n", "")
    assert "nvme: read" in said(done, "kvstore verify --tenant blue --tier nvme --json").json["outcomes"]
    assert re.search(r"memory.* 4 ", said(done, "kvstore prefetch").out)
    assert re.search(r"pinned .* 4 ", said(done, "kvstore pin").out)
    counters = said(done, "kvstore status --tenant blue --json").json["counters"]
    assert counters["redis_written_bytes"] > 0
    with client_of(sidecar, "blue") as client:
        for name in ("code-7b", "doc-7b"):
            assert client.fetch(SPECS[name], tokens).token_count == COUNT
