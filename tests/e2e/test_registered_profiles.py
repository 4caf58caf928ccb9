"""Profiles that are registered with the service: other hosts and later days have them, and nobody else."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvstore_client import Client, Gate, connect
from kvstore_client.gate.exchange import ASKED_S_MIN
from kvstore_client.gate.profiles import Profiles
from kvstore_ops.cli import app
from kvstore_ops.sidecar import Sidecar
from typer.testing import CliRunner

from kvstore.controller.profiles import AHEAD_S_MAX, PROFILES_BYTES_MAX, RegisteredProfiles
from kvstore.errors import InvalidRequest
from kvstore.planning import Calibration, Pair, Point, Profile, Recompute, Side
from kvstore.planning.permit import UNPROFILED
from kvstore.planning.profile import PROFILE_SENT_BYTES_MAX, PROFILES_MAX, Origin
from kvstore.spec import ModelSpec
from kvstore.v1alpha import prefill_pb2
from tests.server.raw import eventually
from tests.simulated.clock import ManualClock
from tests.specs import random_cache, small_spec, tokens_of

SETTING = Recompute.cacheblend(1, 0.25)
MEASURED_S = 1_700_000_000
_fresh = iter(range(1, 1000))


def fresh_spec(**changes: Any) -> ModelSpec:
    """A model that no other test has."""
    return small_spec(weights_digest=f"{next(_fresh):064x}", **changes)


def profile_of(spec: ModelSpec, measured_at_s: int = MEASURED_S, setting: Recompute = SETTING) -> Profile:
    point = Point(setting, setting.share(2), 1.0, 0.0, 0.0, 0.01)
    return Profile(
        receiver=Side.of(spec), sender=None, reuse="position", provenance=Origin.STANDALONE, layer_count=2,
        calibration=Calibration("c3" * 32, (1,), 64, 512, 32), full_quality=1.0, full_standard_error=0.0,
        points=(point,), measured_at_s=measured_at_s,
    )  # fmt: skip


def write(directory: Path, profile: Profile) -> None:
    profiles = Profiles(directory)
    profiles.write(profile, profiles.path(Pair.of_profile(profile)))


@pytest.fixture
def host(sidecar: Sidecar, tmp_path: Path) -> Iterator[Client]:
    """A client of a host that has profiles, on one of the planes."""
    with connect(sidecar.address) as connected:
        connected.gate = Gate(tmp_path / "measured")
        yield connected


@pytest.fixture
def other(sidecar: Sidecar, tmp_path: Path) -> Iterator[Client]:
    """A client of a host that has none, on the other plane."""
    with connect(sidecar.socket_address) as connected:
        connected.gate = Gate(tmp_path / "empty")
        yield connected


def permit(client: Client, spec: ModelSpec) -> Any:
    client.lookup(spec, tokens_of(16))  # the model is registered
    return client.gate.permit(spec, None, "position")


def asks_again(client: Client) -> None:
    """A minute has passed."""
    exchange = client.gate.exchange
    assert exchange is not None
    for pair, answer in exchange._answers.items():
        exchange._answers[pair] = answer._replace(asked_s=answer.asked_s - ASKED_S_MIN)


def kept(client: Client, spec: ModelSpec) -> bytes:
    session = client.connect_now()
    question = prefill_pb2.FindProfileRequest(receiver=spec.weights_digest, reuse="position", provenance="standalone")
    return bytes(session.call(session.prefills.FindProfile, question, 10.0).profile)


def register(client: Client, data: bytes) -> bool:
    session = client.connect_now()
    request = prefill_pb2.RegisterProfileRequest(profile=data)
    return bool(session.call(session.prefills.RegisterProfile, request, 10.0).is_kept)


def told(host: Client, tmp_path: Path, spec: ModelSpec) -> None:
    """The host has a profile, and uses it."""
    write(tmp_path / "measured", profile_of(spec))
    assert permit(host, spec).setting == SETTING
    eventually(lambda: kept(host, spec) != b"")


def test_what_one_host_measured_another_one_reuses_by(host: Client, other: Client, tmp_path: Path) -> None:
    spec = fresh_spec()
    assert permit(other, spec).reason == UNPROFILED
    told(host, tmp_path, spec)
    assert permit(other, spec).setting is None, "it asks once a minute"
    asks_again(other)
    found = permit(other, spec)
    assert (found.setting, found.profile) == (SETTING, profile_of(spec).digest)
    assert other.gate.is_due(found), "its answers are checked here, too"
    assert not list((tmp_path / "empty").glob("*"))


def test_it_is_told_once_in_a_session_and_again_in_the_next(host: Client, tmp_path: Path) -> None:
    spec = fresh_spec()
    told(host, tmp_path, spec)
    session = host.connect_now()
    real, calls = session.prefills.RegisterProfile, []
    session.prefills.RegisterProfile = lambda *given, **more: (calls.append(given), real(*given, **more))[1]
    for _ in range(3):
        assert permit(host, spec).setting == SETTING
    assert not calls
    session.profiles.clear()  # as a new session begins
    permit(host, spec)
    eventually(lambda: len(calls) == 1)


def test_a_session_remembers_so_many_of_the_profiles_that_it_told(
    host: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_client.gate.exchange.PROFILES_TOLD_MAX", 3)
    for _ in range(8):
        told(host, tmp_path, fresh_spec())
        assert 1 <= len(host.connect_now().profiles) <= 3


def test_a_profile_of_other_weights_allows_nothing(host: Client, other: Client, tmp_path: Path) -> None:
    spec = fresh_spec()
    told(host, tmp_path, spec)
    assert permit(other, fresh_spec()).reason == UNPROFILED
    found = permit(other, replace(spec, cache_dtype="float16"))
    assert found.setting is None
    assert "another dtype" in found.reason
    assert permit(other, spec).setting == SETTING


def test_a_hosts_own_profile_comes_first(host: Client, other: Client, tmp_path: Path) -> None:
    spec, own = fresh_spec(), Recompute.cacheblend(1, 0.5)
    told(host, tmp_path, spec)
    write(tmp_path / "empty", profile_of(spec, MEASURED_S - 5, own))
    assert permit(other, spec).setting == own


def test_a_service_that_lies_is_not_believed(other: Client) -> None:
    spec = fresh_spec()
    other.lookup(spec, tokens_of(16))
    session = other.connect_now()
    lies = [
        profile_of(fresh_spec()).to_json().encode(),
        b"\xff\xfe",
        b"{",
        b"[]",
        b"1" * 5000,
        profile_of(spec).to_json().encode(),
    ]
    for lie in lies[:-1]:
        session.prefills.FindProfile = lambda *_, found=lie, **__: prefill_pb2.FindProfileResponse(profile=found)
        assert permit(other, spec).reason == UNPROFILED
        asks_again(other)
    session.prefills.FindProfile = lambda *_, **__: prefill_pb2.FindProfileResponse(profile=lies[-1])
    assert permit(other, spec).setting == SETTING


def test_a_sidecar_that_keeps_none_or_does_not_answer_costs_one_question(other: Client) -> None:
    spec = fresh_spec()
    other.lookup(spec, tokens_of(16))
    session, asked = other.connect_now(), []

    def older(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise InvalidRequest("the sidecar does not know FindProfileRequest")

    session.prefills.FindProfile = older
    for _ in range(3):
        assert permit(other, spec).reason == UNPROFILED
    assert len(asked) == 1


def test_a_sidecar_that_stands_still_is_waited_for_once_however_many_pairs_a_prompt_has(
    own_sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_client.gate.exchange.WAIT_S", 0.2)
    with connect(own_sidecar.socket_address) as client:
        client.gate = Gate(tmp_path / "empty")
        receiver = fresh_spec()
        client.lookup(receiver, tokens_of(16))
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                assert client.gate.permit(receiver, fresh_spec(), "sibling").reason == UNPROFILED
            assert client.statistics()["unavailable"] == 1
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)


def changed(spec: ModelSpec, **changes: Any) -> bytes:
    return json.dumps({**json.loads(profile_of(spec).to_json()), **changes}).encode()


def inside(spec: ModelSpec, field: str, **changes: Any) -> bytes:
    """One object of a profile with other values."""
    found = json.loads(profile_of(spec).to_json())[field]
    whole = [{**found[0], **changes}] if isinstance(found, list) else {**found, **changes}
    return changed(spec, **{field: whole})


def test_a_gate_of_two_clients_shows_neither_what_the_other_registered(
    host: Client, other: Client, tmp_path: Path
) -> None:
    """They may be of two tenants."""
    spec = fresh_spec()
    told(host, tmp_path, spec)
    shared = Gate(tmp_path / "shared")
    other.gate = shared
    assert permit(other, spec).setting == SETTING, "while it is one client's"
    host.gate = shared
    assert permit(other, spec).reason == UNPROFILED
    write(tmp_path / "shared", profile_of(mine := fresh_spec()))
    assert permit(other, mine).setting == SETTING
    assert kept(host, mine) == b""


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (lambda spec: b"\xff\xfe\x00", "not text"),
        (lambda spec: b"", "not JSON"),
        (lambda spec: b"[" * 60_000, "not JSON"),
        (lambda spec: b'{"version": NaN}', "not JSON"),
        (lambda spec: b"{}", "version"),
        (lambda spec: changed(spec, version=3), "version"),
        (lambda spec: changed(spec, rule="whatever I like"), "rule"),
        (lambda spec: changed(spec, reuse="everything"), "reuse"),
        (lambda spec: changed(spec, layer_count=10**30), "layer_count"),
        (lambda spec: changed(spec, full_quality=2.0), "full_quality"),
        (lambda spec: changed(spec, points=[{}]), "points[0]"),
        (lambda spec: changed(spec, unheard_of=1), "unheard_of"),
        (lambda spec: changed(spec, measured_at_s=int(time.time()) + 3 * AHEAD_S_MAX), "future"),
        (lambda spec: inside(spec, "receiver", model_id="half a character: \ud800"), "receiver.model_id"),
        (lambda spec: inside(spec, "points", kl=10**400), "points[0].kl"),
        (lambda spec: inside(spec, "calibration", seeds=[1] * 2000), "calibration.seeds"),
        (lambda spec: b" " * (PROFILE_SENT_BYTES_MAX + 1), "RegisterProfileRequest.profile"),
        (lambda spec: b" " * (1 << 20), "RegisterProfileRequest"),
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused_by_name(host: Client, hostile: Any, said: str) -> None:
    spec = fresh_spec()
    with pytest.raises(InvalidRequest) as refused:
        register(host, hostile(spec))
    assert said in refused.value.message
    assert kept(host, spec) == b""


def test_a_question_for_an_unheard_of_reuse_is_refused_by_name(host: Client) -> None:
    session = host.connect_now()
    for reuse, provenance in (("all", "standalone"), ("position", "from nowhere")):
        question = prefill_pb2.FindProfileRequest(receiver="ab", reuse=reuse, provenance=provenance)
        with pytest.raises(InvalidRequest, match="unknown here"):
            session.call(session.prefills.FindProfile, question, 10.0)


def test_without_a_session_nobody_asks_or_registers(host: Client) -> None:
    prefills = host.connect_now().prefills
    calls = (prefills.FindProfile, prefill_pb2.FindProfileRequest()), (
        prefills.RegisterProfile, prefill_pb2.RegisterProfileRequest(),
    )  # fmt: skip
    for call, request in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=10.0)
        assert caught.value.code().name == "UNAUTHENTICATED"


def test_the_newer_one_stays(host: Client) -> None:
    spec = fresh_spec()
    old, new = profile_of(spec, MEASURED_S - 1), profile_of(spec)
    assert register(host, new.to_json().encode())
    assert not register(host, old.to_json().encode())
    assert kept(host, spec) == new.to_json().encode()


def test_models_shows_that_there_is_one(host: Client, sidecar: Sidecar) -> None:
    spec = fresh_spec(model_id="profiled")
    host.store(spec, tokens_of(16), random_cache(spec, 16)).wait(10.0)
    same_name = fresh_spec(model_id="not-profiled")
    host.store(same_name, tokens_of(16), random_cache(same_name, 16)).wait(10.0)
    register(host, profile_of(spec).to_json().encode())
    words = ["models", "--address", sidecar.socket_address]
    table = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output
    assert [line.split()[1] for line in table.splitlines() if "position (standalone)" in line] == ["profiled"]
    rows = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert {row["model_id"]: row["profiles"] for row in rows if "profiled" in row["model_id"]} == {
        "profiled": ["position (standalone)"], "not-profiled": [],
    }  # fmt: skip


def test_a_plan_says_how_documents_may_be_reused(
    host: Client, sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another host"))
    spec = fresh_spec(model_id="planned")
    host.lookup(spec, tokens_of(16))
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([1] * 40))
    words = ["plan", "--model", "planned", "--prompt", str(prompt), "--address", sidecar.socket_address]
    assert UNPROFILED[:40] in CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output
    register(host, profile_of(spec).to_json().encode())
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output
    assert "documents (standalone): reused at 62% of the compute, at a floor of 0.99: layers 0 to 0, 25% by" in shown
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["documents"]
    assert found["preamble"] == UNPROFILED
    assert "25% by deviation" in found["standalone"]


def test_it_is_there_after_a_restart_and_a_damaged_file_is_left_alone(own_sidecar: Sidecar, tmp_path: Path) -> None:
    spec = fresh_spec()
    with connect(own_sidecar.address) as client:
        client.gate = Gate(tmp_path / "measured")
        told(client, tmp_path, spec)
    own_sidecar.stop()
    own_sidecar.start()
    with connect(own_sidecar.address) as client:
        client.gate = Gate(tmp_path / "empty")
        assert permit(client, spec).setting == SETTING
    own_sidecar.stop()
    (path,) = own_sidecar.directory.rglob("profiles/default.json")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.01"))
    own_sidecar.start()
    with connect(own_sidecar.address) as client:
        assert kept(client, spec) == b""
    assert "registered profiles of the last start are lost" in (own_sidecar.directory / "log").read_text()


def test_they_are_bounded_and_the_one_that_nobody_asks_for_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = RegisteredProfiles(ManualClock())
    specs = [fresh_spec() for _ in range(PROFILES_MAX + 1)]
    pairs = [Pair.of_profile(profile_of(spec)) for spec in specs]
    for spec in specs[:-1]:
        assert registered.register(profile_of(spec, 1).to_json().encode())
    assert registered.find(pairs[0])
    assert registered.register(profile_of(specs[-1], 1).to_json().encode())
    assert [bool(registered.find(pair)) for pair in (pairs[0], pairs[1], pairs[-1])] == [True, False, True]
    long = "m" * (PROFILE_SENT_BYTES_MAX // 2)
    for _ in range(3 * PROFILES_BYTES_MAX // PROFILE_SENT_BYTES_MAX):
        profile = profile_of(fresh_spec(), 1)
        registered.register(replace(profile, receiver=replace(profile.receiver, model_id=long)).to_json().encode())
    assert sum(len(each.text) for each in registered._kept.values()) <= PROFILES_BYTES_MAX
    again = RegisteredProfiles(ManualClock())
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", None)  # the service packs on its loop: it reads none of them again
        data = registered.pack()
    again.unpack(data)
    assert again._kept == registered._kept
    assert not registered.is_changed


def test_a_profile_that_grows_when_it_is_written_out_is_refused() -> None:
    profile = profile_of(fresh_spec(), 1)
    long = replace(profile, receiver=replace(profile.receiver, model_id="\u00e9" * 20_000))
    data = json.dumps(json.loads(long.to_json()), ensure_ascii=False).encode()
    assert len(data) <= PROFILE_SENT_BYTES_MAX
    with pytest.raises(InvalidRequest, match="bytes: at most"):
        RegisteredProfiles(ManualClock()).register(data)
