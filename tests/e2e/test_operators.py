"""What operators ask of a real sidecar with several tenants, by its commands and by raw calls."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from kvstore_client import Client, connect
from kvstore_ops import options
from kvstore_ops.operators import calls
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import ERRORS, DeadlineExceeded, Internal, InvalidRequest, PermissionDenied, Unavailable
from kvstore.keys import chain_digests
from kvstore.spec import Durability
from kvstore.v1 import remote_pb2 as rpb
from kvstore.v1alpha import admin_pb2
from kvstore.wire import METADATA_SESSION, METADATA_TOKEN
from tests.conftest import ROOT
from tests.ops.command import Done, run
from tests.security.tenancy import client_of, tenants_sidecar, token_of, write_private
from tests.server.raw import Raw, eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec(model_id="house/model-one")
HOSTILE = small_spec(model_id="[bold red]x[/]\x1b[2J\r\n‮evil", weights_digest="cd" * 32)
STEP = SPEC.chunk_tokens
OPERATOR = "the-token-of-an-operator-of-b"


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    running = tenants_sidecar("--capacity", "16 MiB", names=("a", "b"))
    section = "KVSTORE__TENANTS__B__TOKEN_FILE"
    both = write_private(running.directory / "b.operators", f"{token_of('b')}\n{OPERATOR} admin")
    assert running.environment is not None
    own = {f"KVSTORE__TENANTS__{name}__NVME_CAPACITY_BYTES": "64 MiB" for name in ("A", "B")}
    running.environment = {**running.environment, section: both, **own}
    with running:
        yield running


def keep(client: Client, count: int, seed: int, spec: Any = SPEC) -> tuple[Any, list[str]]:
    """Store a context down to the device. Its tokens, and its chunks' digests in hex."""
    tokens = tokens_of(count, seed)
    assert client.store(spec, tokens, random_cache(spec, count, seed)).wait(20) is Durability.LOCAL
    return tokens, [each.hex() for each in chain_digests(tokens, STEP)]


@pytest.fixture(scope="module")
def stored(sidecar: Sidecar) -> list[str]:
    """Tenant a has four chunks of one model and two of a hostile one; tenant b has one."""
    with client_of(sidecar, "a") as client:
        digests = keep(client, 4 * STEP, 1)[1]
        keep(client, 2 * STEP, 2, HOSTILE)
    with client_of(sidecar, "b") as client:
        keep(client, STEP, 3)
    return digests


def ask(sidecar: Sidecar, tenant: str, *arguments: str) -> Done:
    socket = sidecar.address.removeprefix("unix://") if sidecar.plane == "local" else str(
        sidecar.directory / "run" / "kvstore.sock"
    )  # fmt: skip
    return run(*arguments, "--socket", socket, "--tenant", tenant)


def test_tiers_are_told_with_what_they_hold_and_survive(sidecar: Sidecar, stored: list[str]) -> None:
    found = ask(sidecar, "a", "tiers", "--json").json
    memory, device = found["tiers"]
    assert (memory["name"], memory["durability"], memory["chunk_count"]) == ("dram", "memory", 6)
    assert (device["name"], device["durability"], device["chunk_count"]) == ("nvme", "local", 6)
    assert device["state"] == "up"
    assert found["tenant"] == "a"
    shown = ask(sidecar, "a", "tiers")
    assert shown.code == 0
    assert "nvme" in shown.out
    assert "LOCAL" in shown.out


def test_a_listing_has_every_chunk_once_and_its_totals(sidecar: Sidecar, stored: list[str]) -> None:
    found = ask(sidecar, "a", "ls", "--model", "house/model-one", "--json").json
    assert sorted(each["digest"] for each in found["chunks"]) == sorted(stored)
    (total,) = found["totals"]
    assert (total["model_id"], total["chunk_count"]) == ("house/model-one", 4)
    assert total["byte_count"] == sum(each["byte_count"] for each in found["chunks"])
    assert total["tiers"]["dram"]["chunk_count"] == total["tiers"]["nvme"]["chunk_count"] == 4
    by_digest = {each["digest"]: each for each in found["chunks"]}
    assert by_digest[stored[2]]["parent"] == stored[1]
    assert [copy["tier"] for copy in by_digest[stored[0]]["copies"]] == ["dram", "nvme"]
    assert abs(by_digest[stored[0]]["stored_seconds"] - time.time()) < 600
    assert by_digest[stored[3]]["child_count"] == 0


def test_selections_select(sidecar: Sidecar, stored: list[str]) -> None:
    def count(*arguments: str) -> int:
        totals = ask(sidecar, "a", "ls", "--limit", "0", "--json", *arguments).json["totals"]
        return sum(each["chunk_count"] for each in totals)

    size = ask(sidecar, "a", "ls", "--json").json["chunks"][0]["byte_count"]
    assert count() == 6
    assert count("--model", "model-one") == 4  # the id's last part
    assert count("--digest", stored[0][:20]) == 1
    assert count("--digest", stored[0].upper()) == 1
    assert count("--tier", "memory") == count("--tier", "nvme") == 6
    assert count("--older-than", "1 h") == 0
    assert count("--larger-than", str(size)) == count("--smaller-than", str(size)) == 6
    assert count("--larger-than", str(size + 1)) == count("--smaller-than", str(size - 1)) == 0


def test_a_listing_says_how_much_more_there_is(sidecar: Sidecar, stored: list[str]) -> None:
    found = ask(sidecar, "a", "ls", "--limit", "2")
    assert "2 of 6 chunks" in found.out


def test_what_is_not_there_is_named_with_what_is(sidecar: Sidecar, stored: list[str]) -> None:
    model = ask(sidecar, "a", "ls", "--model", "nothing")
    assert model.code == 2
    assert "house/model-one" in model.err
    tier = ask(sidecar, "a", "ls", "--tier", "tape")
    assert tier.code == 2
    assert "memory, nvme" in tier.err
    digits = ask(sidecar, "a", "ls", "--digest", "xyz")
    assert digits.code == 2
    assert "hexadecimal" in digits.err


def test_a_chunk_is_shown_by_its_first_digits(sidecar: Sidecar, stored: list[str]) -> None:
    shown: list[Any] = []

    def is_free() -> bool:
        shown[:] = ask(sidecar, "a", "show", stored[2][:10], "--json").json["parts"]
        return not shown[0]["is_held"]

    eventually(is_free)  # a check of the device may just read it
    (part,) = shown
    assert part["digest"] == stored[2]
    assert part["ancestors"] == [stored[1], stored[0]]
    assert part["children"] == [stored[3]]
    assert part["levels"] == ["memory", "local"]
    assert (part["lease_count"], part["hold_count"], part["is_held"]) == (0, 0, False)
    assert part["header"]["kind"] == "kv"
    assert part["header"]["first_position"] == 2 * STEP
    assert len(part["header"]["write_id"]) == 32
    shown = ask(sidecar, "a", "show", stored[2])
    assert stored[2] in shown.out.replace("\n", "")
    assert stored[1][:16] in shown.out


def test_who_holds_a_chunk_is_shown(sidecar: Sidecar, stored: list[str]) -> None:
    with client_of(sidecar, "a") as client:
        assert client.lookup(SPEC, tokens_of(4 * STEP, 1), hold=True).ticket

        (part,) = ask(sidecar, "a", "show", stored[0], "--json").json["parts"]
        assert (part["hold_count"], part["is_held"]) == (1, True)


def test_a_chunk_that_is_not_there_has_an_exit_code_of_its_own(sidecar: Sidecar, stored: list[str]) -> None:
    missing = ask(sidecar, "a", "show", "00" * 32)
    assert missing.code == 3
    assert "no chunk" in missing.err
    assert ask(sidecar, "a", "show", "ab").code == 2


def test_models_are_told_the_largest_first(sidecar: Sidecar, stored: list[str]) -> None:
    found = ask(sidecar, "a", "models", "--json").json
    assert [each["chunk_count"] for each in found] == [4, 2]
    assert found[0]["tiers"]["nvme"]["chunk_count"] == 4


def test_names_that_others_chose_are_harmless_in_every_table(sidecar: Sidecar, stored: list[str]) -> None:
    (digest,) = [
        each["digest"]
        for each in ask(sidecar, "a", "ls", "--json").json["chunks"]
        if each["model_id"] == HOSTILE.model_id and each["child_count"]
    ]
    for command in (["ls"], ["models"], ["show", digest], ["status"]):
        shown = ask(sidecar, "a", *command)
        assert shown.code == 0, shown.err
        assert not set(shown.out) & set("\x1b\r\u202e"), command
        assert "[bold" in shown.out, command
    wrong = ask(sidecar, "a", "ls", "--model", "none")
    assert not set(wrong.err) & set("\x1b\r\u202e")


def test_no_tenant_sees_or_counts_anothers(sidecar: Sidecar, stored: list[str]) -> None:
    found = ask(sidecar, "b", "ls", "--json").json
    assert [each["chunk_count"] for each in found["totals"]] == [1]
    assert not {each["digest"] for each in found["chunks"]} & set(stored)
    assert ask(sidecar, "b", "show", stored[0]).code == 3
    assert ask(sidecar, "default", "ls", "--json").json == {"chunks": [], "totals": []}


def test_a_token_needs_the_right_and_then_sees_its_tenants_own(
    sidecar: Sidecar, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = ("--address", sidecar.tcp_address)
    monkeypatch.setenv("KVSTORE_TOKEN", token_of("b"))
    for command in (["tiers"], ["ls"], ["models"], ["show", stored[0]]):
        refused = run(*command, *remote)
        assert refused.code == 5, command
        assert "admin" in refused.err
    assert run("status", *remote).code == 0  # as before
    monkeypatch.setenv("KVSTORE_TOKEN", OPERATOR)
    assert run("tiers", *remote, "--json").json["tenant"] == "b"
    assert [each["chunk_count"] for each in run("models", *remote, "--json").json] == [1]
    assert run("show", stored[0], *remote).code == 3
    said = run("evict", "--all", "--dry-run", *remote, "--json").json  # of its own tenant
    assert said["outcomes"]["removed"]["chunk_count"] == 1
    assert run("verify", *remote, "--json").json["outcomes"]["nvme: read"]["chunk_count"] == 1
    with connect(sidecar.tcp_address, token=OPERATOR) as client:
        assert client.fetch(SPEC, tokens_of(STEP, 3)).token_count == STEP


def test_every_method_of_the_admin_service_asks_for_the_right(sidecar: Sidecar) -> None:
    """Whatever is added to it: nothing but Stats is for every token."""
    bearer = (METADATA_TOKEN, f"Bearer {token_of('b')}")
    with grpc.insecure_channel(sidecar.tcp_address) as channel:
        stream = channel.unary_stream("/kvstore.v1.RemoteService/Connect")(
            rpb.ConnectRequest(version=1).SerializeToString(), timeout=20, metadata=(bearer,)
        )
        secret = rpb.ConnectResponse.FromString(next(stream)).secret
        service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
        for method in service.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            try:
                call = make(f"/{service.full_name}/{method.name}")(
                    b"", timeout=20, metadata=(bearer, (METADATA_SESSION, secret))
                )
                list(call) if method.server_streaming else call
                status = "OK"
            except grpc.RpcError as error:
                status = error.code().name
            assert status == ("OK" if method.name == "Stats" else "PERMISSION_DENIED"), method.name
        stream.cancel()


def test_settings_are_reloaded_by_the_socket_alone(
    sidecar: Sidecar, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator may do so from afar: the door itself refuses it."""
    with connect(sidecar.tcp_address, token=OPERATOR) as client:
        with pytest.raises(PermissionDenied, match="not over TCP"):
            calls.Operator(client).reload(dry_run=True)
    assert ask(sidecar, "default", "reload", "--dry-run").code == 0
    monkeypatch.setenv("KVSTORE_TOKEN", OPERATOR)
    assert run("reload", "--address", sidecar.tcp_address).code == 2


def test_a_tenant_that_is_not_there_is_named_with_those_that_are(sidecar: Sidecar) -> None:
    for command in (["tiers"], ["evict", "--all", "--yes"], ["top", "--count", "1"], ["status"]):
        done = ask(sidecar, "nobody", *command)
        assert done.code == 2, done
        assert "default, a, b" in done.err
    assert run("tiers", "--socket", "/nonexistent/kvstore.sock", "--tenant", "a").code == 4


def test_nobody_there_has_an_exit_code_and_a_remedy() -> None:
    for command in (["tiers"], ["ls"], ["models"], ["show", "abcd"]):
        done = run(*command, "--socket", "/nonexistent/kvstore.sock")
        assert done.code == 4, command
        assert "kvstore serve" in done.err


def test_a_sidecar_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sidecar("--capacity", "8 MiB") as own:
        socket = own.address.removeprefix("unix://")
        monkeypatch.setattr(calls, "ANSWER_S_MAX", 0.3)
        with connect(own.address) as client:
            operator = calls.Operator(client)
            os.kill(own.pid, signal.SIGSTOP)
            try:
                for ask_it in (operator.tiers, lambda: list(operator.chunks(admin_pb2.Selection(), 1))):
                    with pytest.raises(DeadlineExceeded):
                        ask_it()
            finally:
                os.kill(own.pid, signal.SIGCONT)
        assert run("tiers", "--socket", socket).code == 0


def test_a_command_whose_sidecar_ends_meanwhile_says_what_that_means() -> None:
    with Sidecar("--capacity", "8 MiB") as own, connect(own.address) as client:
        change = calls.Operator(client).change(admin_pb2.ChangeRequest(evict=admin_pb2.Evict()))
        os.kill(own.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor() as pool:
                ended = pool.submit(list, change)
                time.sleep(0.2)
                client.close()  # as the session ends when the sidecar does
                with pytest.raises(Unavailable, match=r"what was done is done.* Run it again"):
                    ended.result(10)
        finally:
            os.kill(own.pid, signal.SIGCONT)


def test_a_sidecar_of_another_release_is_named_as_that(
    sidecar: Sidecar, stored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(sidecar, "a") as client:
        operator = calls.Operator(client)
        session: Any = client.connect_now()
        unknown = "/kvstore.v1alpha.AdminService/Unknown"
        monkeypatch.setattr(
            session.admin, "Tiers",
            session.channel.unary_unary(unknown, lambda each: each.SerializeToString(), bytes),
        )  # fmt: skip
        monkeypatch.setattr(
            session.admin, "ListChunks",
            session.channel.unary_stream(unknown, lambda each: each.SerializeToString(), bytes),
        )  # fmt: skip
        for ask_it in (operator.tiers, lambda: list(operator.chunks(admin_pb2.Selection(), 1))):
            with pytest.raises(InvalidRequest, match="another release"):
                ask_it()


def test_every_exit_code_has_its_line() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    own = {options.NOT_FOUND, options.NOT_CONFIRMED, options.NOT_ALL, options.UNWELL, options.OUTPUT_LOST}
    codes = {*options.EXIT_CODES.values(), *own}
    assert {int(each) for each in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes | {0, 1}
    assert {kind for kind in ERRORS if kind not in options.EXIT_CODES} == {Internal}


def test_listings_do_not_pile_up(sidecar: Sidecar, stored: list[str]) -> None:
    """A reader that goes in the middle of a listing leaves nothing behind, and others are answered meanwhile."""
    with Raw(sidecar, "a") as raw:
        metadata = ((METADATA_SESSION, raw.secret),)
        for _ in range(50):
            stream = raw.admin.ListChunks(admin_pb2.ListChunksRequest(limit=10), timeout=20, metadata=metadata)
            next(stream)
            stream.cancel()
        eventually(lambda: ask(sidecar, "a", "models").code == 0)
