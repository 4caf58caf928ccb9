"""What operators change from another host: by TCP with a token, in the open and in TLS, as one of two tenants."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kvstore_client import Client
from kvstore_client.loading import call as calls
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar

from kvstore.planning.loading import Prefill, Way
from kvstore.spec import Tier
from tests.e2e.stored import STEP, Stored, both, chunks_of
from tests.fakes.redis_server import RedisServer
from tests.fakes.tls import made_certificates
from tests.ops.command import Done, run
from tests.security.tenancy import client_of, tenants_sidecar, token_of, write_private
from tests.server.raw import eventually
from tests.specs import tokens_of

PLAIN = "in the open"
TLS = pytest.param("in TLS", marks=pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"))  # fmt: skip


class Afar(NamedTuple):
    """A sidecar with the tenants a and b. ``where``: the options that name it. ``a``, ``b``: engines on its host."""

    sidecar: Sidecar
    where: tuple[str, ...]
    a: Client
    b: Client


@pytest.fixture(scope="module", params=[PLAIN, TLS])
def afar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Afar]:
    own, tls = {}, ()
    if request.param != PLAIN:
        place = tmp_path_factory.mktemp("tls")
        made_certificates(place)
        files = {"CERTIFICATE_FILE": "server.crt", "KEY_FILE": "server.key", "CLIENT_CA_FILE": "ca.crt"}
        own = {f"REMOTE__{name}": str(place / file) for name, file in files.items()}
        tls = ("--tls", ",".join(str(place / each) for each in ("ca.crt", "client.crt", "client.key")))
    with RedisServer() as redis:
        own |= {f"TENANTS__{name}__NVME_CAPACITY_BYTES": "32 MiB" for name in ("A", "B")}
        own |= {"TIERS__REDIS__URL": redis.url, "TIERS__REDIS__WRITE": "never", "TIERS__REDIS__LOOKUP_S_MAX": "1 s",
                "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0"}  # fmt: skip
        sidecar = tenants_sidecar("--capacity", "16 MiB", **{f"KVSTORE__{name}": value for name, value in own.items()})
        for name in ("a", "b"):
            write_private(sidecar.directory / f"{name}.tokens", f"{token_of(name)}\n{operators(name)} admin")
        with sidecar, client_of(sidecar, "a", planning="on") as a, client_of(sidecar, "b") as b:
            yield Afar(sidecar, ("--address", sidecar.tcp_address, *tls), a, b)


def operators(tenant: str) -> str:
    return f"the-token-of-an-operator-of-{tenant}"


@pytest.fixture
def say(afar: Afar, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``kvstore`` as tenant a's operator."""
    monkeypatch.setenv("KVSTORE_TOKEN", operators("a"))

    def said(*arguments: str) -> Done:
        return run(*arguments, *afar.where)

    return said


def test_evict_takes_the_tenants_own_and_no_other(afar: Afar, say: Any) -> None:
    stored, other, theirs = Stored(afar.a, 3, tail=4), Stored(afar.a, 2), Stored(afar.b, 2)
    assert say("evict", "--model", theirs.name, "--yes").code == 2  # whose name shows in none of tenant a's tables
    words, done = both(say, stored, "evict", "--model", stored.name, "--yes")
    assert (words, done.code) == ({"removed": 4, "no longer durable": 4}, 0)
    assert [each.hit_count for each in (stored, other, theirs)] == [0, 2 * STEP, 2 * STEP]
    assert theirs.name not in say("models").out


def test_pin_and_unpin(afar: Afar, say: Any) -> None:
    stored = Stored(afar.a, 2)
    assert both(say, stored, "pin", "--model", stored.name)[0] == {"pinned": 2}
    done = say("evict", "--model", stored.name, "--yes", "--json")
    assert (done.code, list(done.json["outcomes"])) == (10, ["held by a pin"])
    assert both(say, stored, "unpin", "--model", stored.name)[0] == {"unpinned": 2}
    assert afar.a.stats().arena.pinned_bytes == 0
    assert stored.hit_count == 2 * STEP


def test_move_and_prefetch(afar: Afar, say: Any, tmp_path: Path) -> None:
    stored = Stored(afar.a, 3)
    words, done = both(say, stored, "move", "--model", stored.name, "--to", "redis", "--yes")
    assert words == {"written": 3, "given up by faster tiers": 3, "no longer durable": 3}
    assert (done.code, chunks_of(say, stored.name)) == (0, {})
    assert stored.hit_count == 3 * STEP
    back = ("move", "--model", stored.name, "--to", "nvme", "--yes")
    eventually(lambda: say(*back).code == 0)  # not while a write still holds one of them
    prompt = ("--model", stored.name, "--prompt", stored.prompt(tmp_path))
    assert both(say, stored, "prefetch", *prompt)[0] == {"brought into memory": 3}
    assert [each.tier for each in afar.a.lookup(stored.spec, stored.tokens).chunks] == [Tier.DRAM] * 3
    assert "48" in say("locate", *prompt).out


def test_drain_empties_a_tier_of_the_tenant_alone(afar: Afar, say: Any) -> None:
    assert say("evict", "--all", "--yes").code == 0
    stored, theirs = Stored(afar.a, 2), Stored(afar.b, 2)
    words, done = both(say, stored, "drain", "--tier", "nvme", "--yes")
    assert (words, done.code) == ({"written": 2, "given up by faster tiers": 2, "no longer durable": 2}, 0)
    assert say("tiers", "--json").json["tiers"][1]["is_draining"]
    assert say("ls", "--tier", "nvme", "--json").json["chunks"] == []
    assert theirs.hit_count == 2 * STEP
    theirs.tokens = tokens_of(2 * STEP, 998)
    theirs.store()  # to the device, which takes tenant b's as before
    assert both(say, stored, "drain", "--tier", "nvme", "--end")[1].code == 0
    assert say("drain").code == 0
    assert not say("tiers", "--json").json["tiers"][1]["is_draining"]
    assert stored.hit_count == 2 * STEP


def test_plans_and_top(afar: Afar, say: Any) -> None:
    stored = Stored(afar.a, 4)
    for _ in range(20):
        afar.a.planner.computed(stored.spec, 0, Prefill(1000, 0, 1.0))
    prompt = Prompt.of(stored.spec, tokens_of(4 * STEP + 1, stored.number), (), None)
    begun = afar.a.planner.begin(prompt, calls.Asked(4 * STEP, 0, frozenset(Way), "on"))
    assert begun is not None
    with begun as call:
        call.end(2.0, 0.5, is_given_up=False, computed=None)
    assert stored.name in say("plans").out
    assert say("plans", "--limit", str(1 << 40)).code == 2
    shown = say("top", "--count", "1")
    assert shown.code == 0
    assert "tenant a" in shown.out
    assert "nvme" in shown.out


def test_a_token_without_the_right_is_refused_by_each_command_and_nothing_is_done(
    afar: Afar, say: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored = Stored(afar.a, 2)
    before = chunks_of(say, stored.name)
    prompt = ("--model", stored.name, "--prompt", stored.prompt(tmp_path))
    monkeypatch.setenv("KVSTORE_TOKEN", token_of("a"))
    for command in (
        ("evict", "--all", "--yes"), ("evict", "--model", stored.name, "--yes"), ("pin", "--digest", stored.digests[0]),
        ("unpin", "--all"), ("move", "--all", "--to", "redis", "--yes"), ("prefetch", *prompt), ("verify",),
        ("drain",), ("drain", "--tier", "nvme", "--yes"), ("drain", "--tier", "nvme", "--end"), ("tiers",), ("top",),
        ("plans",), ("ls",), ("models",), ("show", stored.digests[0]),
    ):  # fmt: skip
        done = say(*command)
        assert (done.code, "admin" in done.err, "Traceback" in done.err) == (5, True, False), (command, done)
        assert done.err.strip().count("\n") == 0, command
    for command in (("status",), ("locate", *prompt)):
        assert say(*command).code == 0, command
    monkeypatch.setenv("KVSTORE_TOKEN", "nobodys-token-at-all")
    assert say("evict", "--all", "--yes").code == 5
    monkeypatch.setenv("KVSTORE_TOKEN", operators("a"))
    assert chunks_of(say, stored.name) == before
    assert not say("tiers", "--json").json["tiers"][1]["is_draining"]


def test_the_token_says_whose_it_is(afar: Afar, say: Any) -> None:
    done = say("evict", "--all", "--yes", "--tenant", "b")
    assert (done.code, "KVSTORE_TOKEN" in done.err) == (2, True)
