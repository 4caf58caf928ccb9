"""The page on the metrics port: what it shows, who may read it, and what many or hostile readers get."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import select
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client import connect
from kvstore_client.loading import call as calls
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar

from kvstore.config import load
from kvstore.controller.benefit import Saving, ServedModel
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.movement.accounts import TierAccount
from kvstore.planning import Recompute
from kvstore.planning.loading import Candidate, LoadPlan, Prefill, Way
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.seams import SystemClock
from kvstore.server.web.facts import NAME_CHARACTERS_MAX, PageTenant
from kvstore.server.web.history import EVENT_COUNT_MAX, SAMPLE_COUNT_MAX, History
from kvstore.server.web.listener import CONNECTION_COUNT_MAX, ReadRights, Reply, Route, WebRequest
from kvstore.server.web.site import FILE_BYTES_MAX, FILES, HERE, WebQuestion, gate_of, read_page_tokens
from kvstore.spec import Durability, Tier
from kvstore.tiers import TierStatistics
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e" + "x" * 400


def port_of(sidecar: Sidecar) -> int:
    """Of its pages."""
    log = sidecar.directory / "log"
    eventually(lambda: '"ready"' in log.read_text())  # it is written behind what the start waits for
    url = next(json.loads(line)["metrics"] for line in log.read_text().splitlines() if '"ready"' in line)
    return int(url.rpartition(":")[2].partition("/")[0])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with Sidecar("--capacity", "16 MiB", "--metrics-port", "0") as sidecar:
        with connect(sidecar.address) as client:
            spec = small_spec(model_id=HOSTILE)
            client.store(spec, tokens_of(32), random_cache(spec, 32)).wait(10)
            client.fetch(spec, tokens_of(64))
            yield port_of(sidecar)


def ask(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=20) as reply:
            return reply.status, dict(reply.headers), reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def say(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(data)
        found = b""
        try:
            while part := line.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


def test_the_page_is_whole_in_itself_and_runs_nothing_that_is_not_its_own(port: int) -> None:
    for path in FILES:
        status, headers, text = ask(port, path)
        assert status == 200
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)
        assert outside in ([], ["http://www.w3.org"])  # the name of SVG
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|<style|\son\w+=|style=", text
        )
    assert re.findall(r"<script[^>]*>(.*?)</script>", (HERE / "page.html").read_text(), re.DOTALL) == [""]


def test_what_it_shows_is_what_the_service_has(port: int) -> None:
    status, headers, text = ask(port, "/page.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    (tenant,) = json.loads(text)["tenants"]
    assert tenant["name"] == "default"
    assert [each["name"] for each in tenant["tiers"]] == ["dram"]
    assert tenant["tiers"][0]["health"] == "up"
    assert (tenant["chunk_count"], tenant["models"][0]["chunk_count"]) == (2, 2)
    assert tenant["models"][0]["model_id"] == HOSTILE[:NAME_CHARACTERS_MAX]
    (hour,) = tenant["served_hours"]
    assert (hour[1:], tenant["models"][0]["served_tokens"]) == ([1, 32, 0.0], 32)
    (hot,) = tenant["hot"]
    assert (hot["above"], hot["token_count"], hot["heat"], hot["tier"]) == (-1, 32, pytest.approx(1, rel=0.1), "dram")
    assert hot["digest"] == "", "whoever guesses a prompt would learn that it was fetched"
    assert len(re.findall("<(?!/?script>)", text)) == 0


def test_it_shows_what_was_planned_and_what_came_of_it() -> None:
    spec, tokens = small_spec(model_id=HOSTILE), tokens_of(65)
    with Sidecar("--capacity", "16 MiB", "--metrics-port", "0") as sidecar:
        port = port_of(sidecar)
        with connect(sidecar.address, planning="on") as client:
            client.store(spec, tokens, random_cache(spec, 65)).wait(10)
            for _ in range(20):
                client.planner.computed(spec, 0, Prefill(1000, 0, 1.0))
            prompt = Prompt.of(spec, tokens, (), None)
            with given(client.planner.begin(prompt, calls.Asked(64, 0, frozenset(Way), "on"))) as call:
                (plan,) = plans_of(port)
                assert (plan["state"], plan["took"], plan["stored_token_count"]) == ("on its way", None, 64)
                call.end(0.5, 0.125, is_given_up=False, computed=None)
                eventually(lambda: plans_of(port)[0]["state"] == "done")
            mended = Candidate(Way.BLEND, "KV", 0, 64, *(0.2,) * 7, setting=Recompute.reuse())
            seen = LoadPlan(65, mended, (client.plan(spec, tokens).prefill, mended), "")
            client.planner._tell({}, [(spec, 0, PlanOutcome(seen, "observe", 64, 0.4), monotonic())])
            eventually(lambda: len(plans_of(port)) == 2)
            told = plans_of(port)[0]
            with given(client.planner.begin(prompt, calls.Asked(64, 0, (), "off"))):
                pass
            eventually(lambda: len(plans_of(port)) == 3 and plans_of(port)[0]["state"] == "gone")
            gone, _, done = plans_of(port)
    assert gone["planned"] is None
    assert done["took"] == {"ttft_s": 0.5, "wait_s": 0.125}
    planned = told["planned"]
    assert (planned["way"], planned["load_stop"], planned["is_carried_out"]) == ("blend", 64, True)
    planned = done["planned"]
    assert planned["is_carried_out"]
    assert (planned["way"], planned["load_start"], planned["load_stop"]) == ("load", 0, 64)
    assert call.plan is not None
    assert (planned["ttft_s"], planned["prefill_s"]) == (call.plan.chosen.ttft_s, call.plan.prefill.ttft_s)
    assert {what for what, _, _ in planned["bars"]} == {"load", "compute the rest"}
    assert done["model_id"] == HOSTILE[:NAME_CHARACTERS_MAX]


def given(call: calls.PrefillCall | None) -> calls.PrefillCall:
    assert call is not None
    return call


def plans_of(port: int) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"a browser cannot read {name}")

    (tenant,) = json.loads(ask(port, "/page.json")[2], parse_constant=refuse)["tenants"]
    return list(tenant["plans"])


def test_probes_and_metrics_have_their_paths(port: int) -> None:
    assert ask(port, "/healthz")[::2] == (200, "ok\n")
    assert ask(port, "/readyz")[::2] == (200, "ready\n")
    assert "kvstore_arena_chunks 2.0" in ask(port, "/metrics")[2]
    assert "# EOF" in ask(port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")[2]
    assert ask(port, "/metrics?name=x")[0] == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"405"),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET /page.html HTTP/1.1\r\nHost: localhost\r\n\r\n", b"404"),
        (b"GET / HTTP/1.1\r\nHost: rebound.example:9464\r\n\r\n", b"421"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"421"),
        (b"GET / HTTP/1.1\r\nHost: [::1]:9464\r\n\r\n", b"200"),
        (b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET /\r\n\r\n", b"400"),
    ],
)
def test_requests_that_are_odd(port: int, data: bytes, status: bytes) -> None:
    assert say(port, data).startswith(b"HTTP/1.1 " + status)


def test_a_request_that_is_too_large_ends_its_connection_alone(port: int) -> None:
    say(port, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
    assert ask(port, "/healthz")[0] == 200


def test_connections_that_ask_nothing_keep_nobody_from_an_answer(port: int) -> None:
    """Whoever reaches the port could have had the service restarted by its probes."""
    idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(CONNECTION_COUNT_MAX)]
    try:
        for _ in range(20):
            assert ask(port, "/healthz")[0] == 200
        turned_away = [line for line in idle if select.select([line], [], [], 0)[0]]
        assert 0 < len(turned_away) < 30, "as many as were in the way"
        assert all(b"Retry-After: 5" in line.recv(4096) for line in turned_away)
    finally:
        for line in idle:
            line.close()


def test_of_a_thousand_browsers_each_is_answered_or_told_to_come_again(port: int) -> None:
    def browse(number: int) -> int:
        try:
            return ask(port, "/page.json" if number % 2 else "/metrics")[0]
        except (OSError, urllib.error.URLError):  # it was turned away before it had asked
            return 503

    with ThreadPoolExecutor(100) as pool:
        found = set(pool.map(browse, range(1000)))
    assert found <= {200, 503}
    assert 200 in found
    eventually(lambda: ask(port, "/page.json")[0] == 200)


# ---------------------------------------------------------------- who may read


async def _nothing(_: WebRequest) -> Reply:
    return Reply(200, b"")


PAGE, METRICS, PROBE = Route(_nothing, is_page=True), Route(_nothing), Route(_nothing, is_open=True)
TOKEN = "0123456789abcdef0123"


def token_file(tmp_path: Path, text: str = f"# the operator's\n{TOKEN}\nanother-token-of-theirs\n") -> Path:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    return path


def statuses(gate: ReadRights, **headers: str) -> list[int]:
    """Of the page, the metrics and a probe; 200: it is answered."""
    request = WebRequest("GET", "/", {"host": "localhost:9464", **headers})
    refusals = [gate.refusal(request, route) for route in (PAGE, METRICS, PROBE)]
    return [200 if each is None else each.status for each in refusals]


def gate(**settings: Any) -> ReadRights:
    return gate_of(load(None, {f"KVSTORE__{name.upper()}": str(value) for name, value in settings.items()}, {}))


def test_the_page_needs_a_token_where_others_could_read_it(tmp_path: Path) -> None:
    file = token_file(tmp_path)
    assert statuses(gate()) == [200, 200, 200]
    assert statuses(gate(server__metrics_host="0.0.0.0")) == [403, 200, 200]
    secret = token_file(tmp_path / "..", "x" * 32 + "\n")
    assert statuses(gate(tenants__red__secret_file=secret)) == [403, 200, 200]
    secret.unlink()
    for host in ("0.0.0.0", "127.0.0.1"):
        guarded = gate(server__metrics_host=host, server__metrics_token_file=file)
        assert statuses(guarded) == [401, 401, 200]
        basic = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
        assert statuses(guarded, authorization=f"Basic {basic}") == [200, 200, 200]
        assert statuses(guarded, authorization="Bearer another-token-of-theirs") == [200, 200, 200]
        wrong = base64.b64encode(f"{TOKEN}:wrong".encode()).decode()
        for bad in (f"Bearer {TOKEN}x", f"Basic {wrong}", "Basic ???", TOKEN, "Bearer ", "Digest x"):
            assert statuses(guarded, authorization=bad) == [401, 401, 200]


def test_other_sites_names_for_this_address_are_refused() -> None:
    assert statuses(gate(), host="evil.example") == [421, 421, 421]
    assert statuses(gate(server__metrics_host="0.0.0.0"), host="node-7:9464") == [403, 200, 200]


@pytest.mark.parametrize("word", ["Basic \xff\xff", "Basic !", "Basic /w==", "Bearer \xff", "Basic"])
def test_who_may_not_read_is_told_so_whatever_he_sends(word: str) -> None:
    gate = ReadRights((b"x" * 32,), "", is_local=True)
    request = WebRequest("GET", "/metrics", {"host": "localhost", "authorization": word})
    refusal = gate.refusal(request, Route(lambda _: asyncio.sleep(0, Reply(200, b""))))
    assert refusal is not None
    assert refusal.status == 401


def test_a_token_file_that_is_too_long_stops_the_start(tmp_path: Path) -> None:
    """Cut where it is too long, its last token would be a shorter one that lets others in."""
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("#" * (FILE_BYTES_MAX - 21) + "\n" + "a" * 64 + "\n")
    with pytest.raises(InvalidRequest, match=r"metrics_token_file.*more than 65536 bytes"):
        read_page_tokens(str(path))


def test_an_address_that_is_not_this_machines_stops_the_start_and_is_named() -> None:
    with pytest.raises(Unavailable, match=r"server\.metrics_host = 192\.0\.2\.1"):
        Sidecar(
            "--capacity", "16 MiB", environment={**os.environ, "KVSTORE__SERVER__METRICS_HOST": "192.0.2.1"}
        ).start()


def test_readers_share_one_answer_and_one_rendering_of_each_form() -> None:
    asked, rendered = [], []

    async def ask_service() -> int:
        asked.append(1)
        return len(asked)

    def render(told: int, form: str) -> Reply:
        rendered.append(form)
        return Reply(200, f"{told} {form}".encode())

    async def read() -> None:
        question = WebQuestion(ask_service, render, asyncio.get_running_loop(), SystemClock(), 60.0)
        replies = await asyncio.gather(*(question.get(form) for form in ("a", "b") * 50))
        assert {reply.body for reply in replies} == {b"1 a", b"1 b"}

    asyncio.run(read())
    assert (len(asked), sorted(rendered)) == (1, ["a", "b"])


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n"])
def test_a_token_file_that_holds_none_stops_the_start(tmp_path: Path, text: str) -> None:
    path = token_file(tmp_path, text)
    with pytest.raises(InvalidRequest, match=r"server\.metrics_token_file"):
        read_page_tokens(str(path))
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_page_tokens(str(path))
    with pytest.raises(InvalidRequest, match=r"server\.metrics_token_file = ~of-nobody-here/a: it cannot be read"):
        read_page_tokens("~of-nobody-here/a")


# ---------------------------------------------------------------- the last hour


def account(problem: str = "", **changes: Any) -> TierAccount:
    counts = dict.fromkeys(
        ("capacity_bytes", "file_bytes", "allocated_bytes", "free_bytes", "quarantined_bytes", "overhead_bytes",
         "chunk_count", "read_bytes", "written_bytes"), 0,
    )  # fmt: skip
    stats = TierStatistics(name="nvme", state="up", **counts)
    return TierAccount(
        stats=stats, kind=Tier.NVME, durability=Durability.LOCAL, stalled_s=0.0, problem=problem, **changes
    )  # fmt: skip


def test_history_has_an_hour_and_no_more() -> None:
    history = History()
    for number in range(2 * SAMPLE_COUNT_MAX):
        counters = {"fetch_hit_chunks": 3 * number, "nvme_written_bytes": 100 * number}
        history.note(counters, [account("full" if number % 2 else "")], float(number))
    assert history.flows()["fetch_hit_chunks"] == [3] * SAMPLE_COUNT_MAX
    assert history.flows()["fetch_bytes"] == [0] * SAMPLE_COUNT_MAX
    assert history.rates("nvme") == (10.0, 0.0)
    assert len(history.events) == EVENT_COUNT_MAX
    assert [each.text for each in history.events][-2:] == ["up", "up: full"]


def test_the_hour_tells_what_fetches_and_plans_saved() -> None:
    told: list[tuple[float, int]] = [(0.0, 0), (1.5, 40), (1.75, 40)]

    class Grows:
        """A controller of a model and a forgotten one, and operators without tiers."""

        def stats(self) -> Any:
            seconds, milliseconds = told.pop(0)
            each = Saving(1, 16, seconds / 2)
            counters = {"partial_prefill_saved_milliseconds": milliseconds}
            return SimpleNamespace(
                counters=counters, models=[SimpleNamespace(served=ServedModel(each))], forgotten=each
            )

        def tiers(self) -> list[TierAccount]:
            return []

    grows: Any = Grows()
    watched = PageTenant(grows, grows, grows, SystemClock(), shows_digests=False)
    for _ in range(3):
        watched.note()
    flows = watched._history.flows()
    assert flows["served_milliseconds"] == [1500, 250]
    assert flows["partial_prefill_saved_milliseconds"] == [40, 0]


def test_health_tells_what_changed_and_when() -> None:
    history = History()
    for second, found in enumerate([account(), account(), account("gone"), account("gone"), account(is_draining=True)]):
        history.note({}, [found], float(second))
    assert [(each.at_s, each.text) for each in history.events] == [(2.0, "up: gone"), (4.0, "draining")]
