"""The ten tasks of docs/operations.md, each command as it stands there, beside a real sidecar with two tenants. What an
operator does between two commands is done, and each task is looked at for what it is to come to."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_client.loading import call as calls
from kvstore_client.prompt import Prompt
from kvstore_ops.operators.calls import Operator as Calls
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unauthenticated
from kvstore.keys import chain_digests
from kvstore.planning.loading import Prefill, Way
from kvstore.spec import Durability
from tests.conftest import ROOT
from tests.fakes.redis_server import RedisServer
from tests.fakes.s3_server import S3Server
from tests.ops.command import Done, run
from tests.security.tenancy import client_of, tenants_sidecar, token_of
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

PAGE = (ROOT / "docs" / "operations.md").read_text()
COMMANDS = [
    line.partition("  #")[0]
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]  # fmt: skip
COUNT = 64
OWNERS = {"chat-7b": "red", "code-7b": "blue", "doc-7b": "blue", "page-7b": "blue", "mail-7b": "red"}
SPECS = {name: small_spec(model_id=name, weights_digest=f"{number:064x}") for number, name in enumerate(OWNERS)}
TOKENS = tokens_of(COUNT, 7)
STEP = SPECS["doc-7b"].chunk_tokens
CHUNKS = COUNT // STEP
NEW_TOKEN = "the-next-token-of-tenant-blue"


def cache_of(name: str) -> Any:
    """Each model's own: it is found by its bytes."""
    return random_cache(SPECS[name], COUNT, list(OWNERS).index(name))


class Operator:
    """Does what stands between the commands of a task. ``left``: what it found when a task was done."""

    def __init__(self, sidecar: Sidecar, redis: RedisServer, s3: S3Server) -> None:
        self.sidecar = sidecar
        self.redis = redis
        self.s3 = s3
        self.left: dict[str, Any] = {}

    def store(self, name: str) -> None:
        with client_of(self.sidecar, OWNERS[name]) as client:
            assert client.store(SPECS[name], TOKENS, cache_of(name)).wait(20) is Durability.LOCAL

    def fetched(self, name: str) -> int:
        """Tokens that a fetch gives, every byte as it was stored. An engine that fetches registers its model."""
        with client_of(self.sidecar, OWNERS[name]) as client:
            found = client.fetch(SPECS[name], TOKENS, verify=True)
            for layer, put in zip(found, cache_of(name), strict=True):
                for got, whole in zip(layer, put, strict=True):
                    assert not found.token_count or np.array_equal(bits(got), whole[:, : found.token_count])
            return found.token_count

    def restart(self) -> None:
        self.sidecar.stop()
        self.sidecar.start()

    def counters(self) -> dict[str, int]:
        with client_of(self.sidecar, "blue") as client:
            return dict(client.stats().counters)

    def is_quiet(self) -> bool:
        """True when every tier has what it takes."""
        with client_of(self.sidecar, "blue") as client:
            return client.stats().backlog_chunk_count == 0

    def tiers_of(self, name: str) -> list[list[str]]:
        """The tiers of each chunk that the node lists of a model."""
        found = run("ls", "--tenant", OWNERS[name], "--model", name, "--json").json["chunks"]
        return [[copy["tier"] for copy in each["copies"]] for each in found]

    # ------------------------------------------------------------ between commands

    def evicted(self) -> None:
        assert self.fetched("chat-7b") == 0
        assert [self.fetched(name) for name in ("mail-7b", "code-7b", "doc-7b")] == [COUNT] * 3

    def moved(self) -> None:
        assert self.tiers_of("code-7b") == []  # the node has nothing of it
        assert len(self.s3.keys("tests/operations")) == CHUNKS
        assert self.tiers_of("doc-7b") == [["dram", "nvme"]] * CHUNKS

    def request_that_is_slow(self) -> None:
        """Two seconds to the first token, half a second of them for a load."""
        with client_of(self.sidecar, "blue", planning="on") as client:
            spec = SPECS["doc-7b"]
            for _ in range(20):
                client.planner.computed(spec, 0, Prefill(1000, 0, 1.0))
            prompt = Prompt.of(spec, tokens_of(COUNT + 1, 7), (), None)
            begun = client.planner.begin(prompt, calls.Asked(COUNT, 0, frozenset(Way), "on"))
            assert begun is not None
            with begun as call:
                call.end(2.0, 0.5, is_given_up=False, computed=None)
                eventually(lambda: Calls(client).plans(1)[0].state == "done")

    def may_enter(self, token: str) -> bool:
        try:
            with connect(self.sidecar.tcp_address, token=token) as client:
                client.connect_now()
        except Unauthenticated:
            return False
        return True

    def rotate_a_token(self) -> None:
        file = self.sidecar.directory / "blue.tokens"
        old = file.read_text()
        file.write_text(f"{NEW_TOKEN}\n{old}")
        self.restart()
        both = self.may_enter(NEW_TOKEN), self.may_enter(token_of("blue"))
        file.write_text(f"{NEW_TOKEN}\n")
        self.restart()
        self.left["tokens"] = (*both, self.may_enter(NEW_TOKEN), self.may_enter(token_of("blue")))
        eventually(lambda: self.fetched("code-7b") == COUNT)  # engines are back; this one's is in the bucket
        assert self.fetched("doc-7b") == COUNT

    def damage_a_chunk(self) -> None:
        body = cache_of("doc-7b")[0][0][:, STEP : 2 * STEP].tobytes()[:64]
        flipped = 0
        for path in self.sidecar.directory.rglob("region-*.kvs"):
            at = path.read_bytes().find(body)
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([body[0] ^ 1]))
                flipped += 1
        assert flipped

    def halve_the_memory(self) -> None:
        with client_of(self.sidecar, "blue") as client:
            before = client.stats().arena.capacity_bytes
        self.sidecar._arguments = ("--capacity", "8 MiB", *self.sidecar._arguments[2:])
        self.restart()
        with client_of(self.sidecar, "blue") as client:
            for name in ("code-7b", "doc-7b"):
                client.lookup(SPECS[name], TOKENS)  # their engines are back
            self.left["memory"] = (before, client.stats().arena.capacity_bytes)

    def use_what_redis_has(self) -> None:
        self.store("page-7b")
        assert run("move", "--tenant", "blue", "--model", "page-7b", "--to", "redis", "--yes").code == 0
        assert self.fetched("page-7b") == COUNT

    def take_the_disk_out(self) -> None:
        own = {f"KVSTORE__TENANTS__{name}__NVME_CAPACITY_BYTES": "0" for name in ("RED", "BLUE")}
        self.sidecar.environment = {**(self.sidecar.environment or {}), **own}
        self.restart()

    def lose_redis(self) -> None:
        """And what memory has."""
        self.sidecar.stop()
        with self.redis.client() as engine:
            engine.flushall()
        self.sidecar.start()


@pytest.fixture(scope="module")
def operator() -> Iterator[Operator]:
    s3 = S3Server()
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as redis:
        own = {f"TENANTS__{name}__NVME_CAPACITY_BYTES": "32 MiB" for name in ("RED", "BLUE")}
        own |= {f"TIERS__REDIS__{name}": value for name, value in
                {"URL": redis.url, "WRITE": "never", "LOOKUP_S_MAX": "1 s"}.items()}  # fmt: skip
        bucket = {"BUCKET": s3.bucket, "ENDPOINT_URL": s3.url, "ADDRESSING": "path", "WRITE": "never",
                  "CHUNK_BYTES_MIN": "0", "LOOKUP_S_MAX": "1 s", "PREFIX": "tests/operations"}  # fmt: skip
        own |= {f"TIERS__S3__{name}": value for name, value in bucket.items()}
        own["POLICY__SCRUB_BYTES_PER_S"] = "0"  # what is just being looked at is held
        sized = {f"KVSTORE__{name}": value for name, value in own.items()}
        with tenants_sidecar("--capacity", "16 MiB", names=("red", "blue"), **sized) as running:
            yield Operator(running, redis, s3)
    s3.stop()


def said(done: dict[str, Done], words: str) -> Done:
    """What the one command said that begins so."""
    (found,) = [each for command, each in done.items() if command.startswith(words)]
    return found


@pytest.mark.timeout(300)  # five starts of a sidecar, and twenty commands
def test_every_task_is_done_by_its_commands(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chat-7b", "mail-7b", "code-7b", "doc-7b"):
        operator.store(name)
    (tmp_path / "prompt.json").write_text(json.dumps([int(each) for each in TOKENS]))
    digests = [each.hex() for each in chain_digests(TOKENS, STEP)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVSTORE_SOCKET", operator.sidecar.socket_address.removeprefix("unix://"))
    before: dict[str, Callable[[], None]] = {
        "kvstore tiers --tenant blue": operator.request_that_is_slow,
        "kvstore verify --tenant blue": operator.rotate_a_token,
        "kvstore verify --tenant blue --tier nvme --json": operator.damage_a_chunk,
        "kvstore prefetch --tenant blue --model doc-7b --prompt prompt.json": operator.halve_the_memory,
        "kvstore status --tenant blue --json": operator.use_what_redis_has,
    }
    after: dict[str, Callable[[], None]] = {
        "kvstore evict --tenant red --model chat-7b --yes": operator.evicted,
        "kvstore move --tenant blue --model code-7b --to s3 --yes": operator.moved,
    }
    assert before.keys() | after.keys() <= set(COMMANDS)
    done: dict[str, Done] = {}
    for command in COMMANDS:
        before.get(command, lambda: None)()
        if command.split()[1] in ("evict", "move", "drain"):
            eventually(operator.is_quiet)  # else a dry run and the change behind it could meet other chunks
        program, *arguments = shlex.split(command.replace("$DIGEST", digests[1]))
        assert program == "kvstore"
        done[command] = run(*arguments)
        assert done[command].code == (8 if command.endswith("--tier nvme --json") else 0), (command, done[command])
        after.get(command, lambda: None)()
    operator.take_the_disk_out()
    look_at_reading(done, digests)
    look_at_changes(done, digests, operator)
    for name in ("code-7b", "doc-7b", "page-7b"):
        eventually(lambda name=name: operator.fetched(name) == COUNT)
    operator.lose_redis()
    eventually(lambda: operator.fetched("code-7b") == COUNT)  # the bucket has it, as it did before the disk went
    assert [operator.fetched(name) for name in ("chat-7b", "doc-7b", "page-7b")] == [0, 0, 0]


def look_at_reading(done: dict[str, Done], digests: list[str]) -> None:
    """Which tenant fills the device; where a prompt is; which request was slow, and for what it waited."""
    assert re.search(r"red.*nvme 96 KiB", done["kvstore status"].out)
    assert re.search(r"chat-7b.* 4 ", done["kvstore models --tenant red"].out)
    assert "64" in said(done, "kvstore locate").out
    listed = said(done, "kvstore ls").out
    assert listed.count("memory nvme") == len(re.findall(r"\d+ s ", listed)) == CHUNKS  # where, and since when
    shown = said(done, "kvstore show").out
    assert digests[1] in shown.replace("\n", "")
    assert re.search(r"stored .*\d+ s ago", shown)
    for words in ("--limit", "--number"):
        shown = said(done, f"kvstore plans --tenant blue {words}").out
        assert re.search(r"doc-7b .* 2,000\.0 +500\.0 done", shown), shown
    assert "prefill" in said(done, "kvstore plans --tenant blue --number").out


def look_at_changes(done: dict[str, Done], digests: list[str], operator: Operator) -> None:
    for words in ("kvstore evict", "kvstore move", "kvstore drain --tenant blue --tier nvme"):
        dry, real = [each for command, each in done.items() if command.startswith(words)]
        assert dry.out.splitlines()[3:] == real.out.splitlines()[3:]  # but for the title
    assert re.search(r"removed .* 4 ", said(done, "kvstore evict --tenant red --model chat-7b --yes").out)
    assert re.search(r"given up.* 4 ", said(done, "kvstore move --tenant blue --model code-7b --to s3 --yes").out)
    assert operator.left["tokens"] == (True, True, True, False)
    found = said(done, "kvstore verify --tenant blue --tier nvme --json").json
    assert found["outcomes"]["nvme: damaged"]["chunk_count"] == 1
    assert digests[1] in found["problem"]
    assert operator.left["memory"] == (16 << 20, 8 << 20)
    assert re.search(r"brought into memory.* 4 ", said(done, "kvstore prefetch").out)
    assert re.search(r"pinned .* 4 ", said(done, "kvstore pin").out)
    counters = said(done, "kvstore status --tenant blue --json").json["counters"]
    assert counters["redis_verified_bytes"] >= sum(half.nbytes for layer in cache_of("page-7b") for half in layer)
    assert counters["redis_written_bytes"] > 0
    freed = said(done, "kvstore drain --tenant blue --tier nvme --yes").out
    assert re.search(rf"given up by faster tiers.* {3 * CHUNKS} ", freed), freed  # of all three models, and none stays
    tiers = run("tiers", "--tenant", "blue", "--json").json["tiers"]
    assert [each["name"] for each in tiers] == ["dram", "redis", "s3"]
