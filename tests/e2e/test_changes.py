"""What operators change in a real sidecar with a device and a shared Redis. Dry runs change nothing, and count what the
run then does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import Durability, Tier
from tests.e2e.stored import STEP, Stored, both, chunks_of
from tests.fakes.redis_server import RedisServer
from tests.ops.command import Done, run
from tests.server.raw import eventually
from tests.specs import random_cache, tokens_of


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def sidecar(redis: RedisServer) -> Iterator[Sidecar]:
    own = {
        "TIERS__REDIS__URL": redis.url, "TIERS__REDIS__WRITE": "never", "TIERS__REDIS__LOOKUP_S_MAX": "1 s",
        "LIMITS__PIN_BYTES_MAX": "64 KiB",
        "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0",
    }  # fmt: skip
    environment = {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}
    with Sidecar("--capacity", "16 MiB", nvme="64 MiB", environment=environment) as running:
        yield running


@pytest.fixture
def say(sidecar: Sidecar) -> Any:
    def said(*arguments: str) -> Done:
        return run(*arguments, "--socket", sidecar.address.removeprefix("unix://"))

    return said


# ---------------------------------------------------------------- evict


def test_a_model_is_evicted_whole_and_stays_gone(client: Client, say: Any) -> None:
    stored, other = Stored(client, 4, tail=5), Stored(client, 2)
    words, done = both(say, stored, "evict", "--model", stored.name, "--yes")
    assert words == {"removed": 5, "no longer durable": 5}
    assert done.code == 0
    assert chunks_of(say, stored.name) == {}
    assert stored.hit_count == 0
    assert other.hit_count == 2 * STEP
    assert client.stats().counters["operator_removed_durable_chunks"] >= 5
    stored.store()
    assert stored.hit_count == len(stored.tokens)


def test_what_hangs_on_an_evicted_chunk_goes_with_it(client: Client, say: Any) -> None:
    stored = Stored(client, 4)
    words, _ = both(say, stored, "evict", "--digest", stored.digests[1], "--yes")
    assert words == {"removed": 1, "removed with what it hung on": 2, "no longer durable": 3}
    assert list(chunks_of(say, stored.name)) == stored.digests[:1]
    assert stored.hit_count == STEP


def test_what_is_held_stays_with_all_that_it_hangs_on(client: Client, say: Any) -> None:
    stored = Stored(client, 4)
    ticket = client.lookup(stored.spec, stored.tokens[: 2 * STEP], hold=True).ticket
    words, done = both(say, stored, "evict", "--model", stored.name, "--yes")
    assert words == {"held": 2, "removed": 2, "no longer durable": 2}
    assert done.code == 10
    assert stored.hit_count == 2 * STEP
    client.release_ticket(ticket)
    assert both(say, stored, "evict", "--model", stored.name, "--yes")[0]["removed"] == 2


def test_a_held_child_keeps_its_parents(client: Client, say: Any) -> None:
    stored = Stored(client, 3)
    assert say("pin", "--digest", stored.digests[2]).code == 0
    words, done = both(say, stored, "evict", "--digest", stored.digests[0], "--yes")
    assert words == {"held by a pin": 3}  # it holds what it hangs on
    assert done.code == 10
    assert say("unpin", "--digest", stored.digests[2]).code == 0
    assert stored.hit_count == 3 * STEP


def test_one_tiers_copies_go_and_the_others_are_found(client: Client, say: Any) -> None:
    stored = Stored(client, 3)
    assert both(say, stored, "evict", "--model", stored.name, "--tier", "memory", "--yes")[0] == {"copy removed": 3}
    assert {copy["tier"] for each in chunks_of(say, stored.name).values() for copy in each["copies"]} == {"nvme"}
    assert stored.hit_count == 3 * STEP  # from the device
    words, _ = both(say, stored, "evict", "--model", stored.name, "--tier", "nvme", "--yes")
    assert words == {"copy removed": 3, "no longer durable": 3}
    assert stored.hit_count == 3 * STEP


def test_over_a_restart_the_evicted_stays_gone_and_the_unnamed_is_told_and_evicted_by_digits() -> None:
    with Sidecar("--capacity", "8 MiB", nvme="32 MiB") as own:
        socket = own.address.removeprefix("unix://")

        def models() -> list[tuple[str, int]]:
            found = run("models", "--json", "--socket", socket).json
            return sorted((each["model_id"], each["chunk_count"]) for each in found)

        with connect(own.address) as client:
            gone, there, unnamed = Stored(client, 2), Stored(client, 1), Stored(client, 3)
            hidden = {1: np.ones((STEP, there.spec.hidden_size), np.uint16)}
            cache = random_cache(there.spec, STEP, there.number)
            assert client.store(there.spec, there.tokens, cache, hidden=hidden).wait(20) is Durability.LOCAL
            assert run("evict", "--model", gone.name, "--yes", "--socket", socket).code == 0
        own.stop()
        (own.directory / "models" / "default.json").unlink()  # as after an earlier release
        own.start()
        assert models() == [("", 1), ("", 1), ("", 3)]  # a namespace each: nobody has come yet
        with connect(own.address) as client:
            gone.client = there.client = client
            assert (gone.hit_count, there.hit_count) == (0, STEP)
            assert models() == [("", 3), (there.name, 2)]  # with its E, which nobody asked for
            found = run("models", "--json", "--socket", socket).json
            (digits,) = [each["fingerprint"] for each in found if not each["model_id"]]
            done = run("evict", "--model", digits[:12], "--yes", "--json", "--socket", socket)
            assert done.json["outcomes"]["removed"]["chunk_count"] == 3
            assert models() == [(there.name, 2)]
            unnamed.client = client
            assert unnamed.hit_count == 0
            assert run("evict", "--model", there.name, "--yes", "--socket", socket).code == 0
            assert models() == []


def test_a_script_that_does_not_say_yes_changes_nothing(client: Client, say: Any) -> None:
    stored = Stored(client, 1)
    dangerous = (
        ["evict", "--model", stored.name],
        ["move", "--model", stored.name, "--to", "redis"],
        ["drain", "--tier", "nvme"],
    )  # fmt: skip
    for command in dangerous:
        done = say(*command)
        assert done.code == 9, command
        assert "--yes" in done.err
        assert "--dry-run" in done.err
    assert len(chunks_of(say, stored.name)) == 1
    assert say("evict", "--yes").code == 2  # nothing said: not everything


def test_names_that_are_not_there_change_nothing(say: Any) -> None:
    assert "no model" in say("evict", "--model", "nothing", "--yes").err
    assert "no tier" in say("move", "--all", "--to", "tape", "--yes").err
    for command in (["move", "--all", "--to", "tape"], ["drain", "--tier", "tape"], ["evict", "--model", "nothing"]):
        done = say(*command)
        assert (done.code, "--yes" in done.err) == (2, False), "asking for more than a right name comes later"
    assert "kvstore scan" in say("evict", "--all", "--tier", "redis", "--yes").err
    assert say("drain", "--tier", "memory", "--yes").code == 2


def test_the_question_before_a_dangerous_change_is_no_part_of_its_json(
    client: Client, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(client, 1)
    monkeypatch.setattr("kvstore_ops.operators.changing._is_at_terminal", lambda: True)
    for answer, code in ((False, 9), (True, 0)):
        monkeypatch.setattr("typer.confirm", lambda *_, answer=answer, **__: answer)
        done = say("evict", "--model", stored.name, "--json")
        assert done.code == code
        assert "removed" in done.err
        assert done.out == "" if code else done.json["outcomes"]["removed"]["chunk_count"] == 1
    assert chunks_of(say, stored.name) == {}


# ---------------------------------------------------------------- pin


def test_a_pin_outlives_its_command_and_ends_by_a_word(client: Client, say: Any) -> None:
    stored = Stored(client, 3)
    words, _ = both(say, stored, "pin", "--digest", stored.digests[1])
    assert words == {"pinned": 1}
    found = chunks_of(say, stored.name)
    assert [found[each]["is_pinned"] for each in stored.digests] == [True, True, False]
    assert client.stats().arena.pinned_bytes == 2 * found[stored.digests[0]]["byte_count"]
    assert both(say, stored, "evict", "--model", stored.name, "--yes")[0] == {
        "removed": 1, "held by a pin": 2, "no longer durable": 1,
    }  # fmt: skip
    assert both(say, stored, "unpin", "--model", stored.name)[0] == {"unpinned": 1}
    assert client.stats().arena.pinned_bytes == 0
    assert both(say, stored, "evict", "--model", stored.name, "--yes")[0]["removed"] == 2


def test_a_pin_ends_after_the_time_that_was_said(client: Client, say: Any) -> None:
    stored = Stored(client, 1)
    assert say("pin", "--model", stored.name, "--for", "1 s").code == 0
    assert client.stats().arena.pinned_bytes
    eventually(lambda: not client.stats().arena.pinned_bytes)
    assert say("pin", "--model", stored.name, "--for", "0 s").code == 2


def test_pins_past_the_limit_pin_nothing(client: Client, say: Any) -> None:
    stored = Stored(client, 40)
    refused = say("pin", "--model", stored.name)
    assert refused.code == 7
    assert "limits.pin_bytes_max" in refused.err
    assert say("pin", "--model", stored.name, "--dry-run").code == 7
    assert client.stats().arena.pinned_bytes == 0


def test_a_prompt_is_pinned_by_its_file(client: Client, say: Any, tmp_path: Path) -> None:
    stored = Stored(client, 2, tail=3)
    words, _ = both(say, stored, "pin", "--model", stored.name, "--prompt", stored.prompt(tmp_path))
    assert words == {"pinned": 3}
    assert say("unpin", "--all").code == 0


def test_a_pin_of_what_nobody_stored_is_not_called_done(client: Client, say: Any, tmp_path: Path) -> None:
    stored = Stored(client, 2)
    (tmp_path / "other.json").write_text("[1, 2, 3]")
    other = ("--model", stored.name, "--prompt", str(tmp_path / "other.json"))
    done = say("pin", *other)
    assert (done.code, "nothing is pinned" in done.out) == (3, True), done
    assert say("pin", *other, "--json").json["outcomes"] == {}
    assert say("unpin", *other).code == 0  # as it is meant to be


# ---------------------------------------------------------------- move and prefetch


def test_a_model_moves_to_a_shared_tier_and_comes_back_on_use(client: Client, say: Any) -> None:
    stored = Stored(client, 3, tail=4)
    words, done = both(say, stored, "move", "--model", stored.name, "--to", "redis", "--yes")
    assert words == {"written": 3, "given up by faster tiers": 3, "no longer durable": 3, "not taken there": 1}
    assert done.code == 0
    assert [each["token_count"] for each in chunks_of(say, stored.name).values()] == [4]
    assert stored.hit_count == len(stored.tokens)  # what stayed hangs on what came back


def test_what_a_tier_does_not_take_is_given_up_nowhere(
    redis: RedisServer, sidecar: Sidecar, client: Client, say: Any
) -> None:
    stored = Stored(client, 2)
    before = chunks_of(say, stored.name)
    with redis.client() as engine:
        engine.config_set("maxmemory", "1mb")  # less than it takes by itself, and nothing may go
        try:
            done = say("move", "--model", stored.name, "--to", "redis", "--yes", "--json")
        finally:
            engine.config_set("maxmemory", "0")
    assert done.code == 10
    byte_count = sum(each["byte_count"] for each in before.values())
    assert done.json["outcomes"] == {"failed": {"chunk_count": 2, "byte_count": byte_count}}
    assert "redis" in done.json["problem"]
    assert chunks_of(say, stored.name) == before
    assert stored.hit_count == 2 * STEP


def test_a_copy_in_a_shared_tier_takes_nothing_away(client: Client, say: Any) -> None:
    stored = Stored(client, 2)
    assert both(say, stored, "move", "--model", stored.name, "--to", "redis", "--keep")[0] == {"written": 2}
    tiers = [[copy["tier"] for copy in each["copies"]] for each in chunks_of(say, stored.name).values()]
    assert tiers == [["dram", "nvme", "redis"]] * 2
    words, _ = both(say, stored, "move", "--model", stored.name, "--to", "redis", "--yes")
    assert words == {"there already": 2, "given up by faster tiers": 2, "no longer durable": 2}


def test_chunks_go_to_the_device_and_come_into_memory(client: Client, say: Any) -> None:
    stored = Stored(client, 3)
    words, _ = both(say, stored, "move", "--model", stored.name, "--to", "nvme", "--yes")
    assert words == {"there already": 3, "given up by faster tiers": 3}
    assert client.lookup(stored.spec, stored.tokens).chunks[0].tier is Tier.NVME
    assert both(say, stored, "move", "--model", stored.name, "--to", "memory")[0] == {"brought into memory": 3}
    assert client.lookup(stored.spec, stored.tokens).chunks[0].tier is Tier.DRAM
    assert both(say, stored, "move", "--model", stored.name, "--to", "memory")[0] == {"in memory already": 3}
    assert stored.hit_count == 3 * STEP


def test_a_prompt_is_prefetched(client: Client, say: Any, tmp_path: Path) -> None:
    stored = Stored(client, 3)
    assert say("move", "--model", stored.name, "--to", "nvme", "--yes").code == 0
    prompt = stored.prompt(tmp_path)
    words, _ = both(say, stored, "prefetch", "--model", stored.name, "--prompt", prompt)
    assert words == {"brought into memory": 3}
    assert both(say, stored, "prefetch", "--model", stored.name, "--prompt", prompt)[0] == {"in memory already": 3}
    assert client.stats().sessions.lease_count == 0
    assert client.lookup(stored.spec, stored.tokens).chunks[2].tier is Tier.DRAM


def test_contexts_are_prefetched_together_and_told_as_one(client: Client, say: Any, tmp_path: Path) -> None:
    """One that is nowhere does not keep the ones behind it away."""
    first, missing = Stored(client, 2), tokens_of(2 * STEP, 998)
    cache = random_cache(first.spec, 3 * STEP, 997)
    last = tokens_of(3 * STEP, 997)
    assert client.store(first.spec, last, cache).wait(20) is Durability.LOCAL
    assert say("move", "--model", first.name, "--to", "nvme", "--yes").code == 0
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([[int(token) for token in each] for each in (first.tokens, missing, last)]))
    words, done = both(say, first, "prefetch", "--model", first.name, "--prompt", str(path))
    assert words == {"brought into memory": 5, "not stored": 2}
    assert done.json["total_count"] == 7


def test_a_prefix_is_prefetched_and_located_by_its_last_chunks_digest(client: Client, say: Any) -> None:
    stored, twin = Stored(client, 3), Stored(client, 1)
    twin.tokens = stored.tokens[:STEP]
    twin.store()
    assert say("move", "--model", stored.name, "--to", "nvme", "--yes").code == 0
    (found,) = say("locate", "--digest", stored.digests[1][:16], "--json").json
    assert found["token_count"] == 2 * STEP
    assert [(each["tier"], each["token_count"]) for each in found["prefixes"]] == [("NVME", 2 * STEP)]
    words, _ = both(say, stored, "prefetch", "--digest", stored.digests[1])
    assert words == {"brought into memory": 2}
    refused = say("prefetch", "--digest", stored.digests[0])
    assert (refused.code, twin.name in refused.err) == (2, True)
    assert say("prefetch", "--digest", stored.digests[0], "--model", twin.name).code == 0
    for wrong in (["--digest", "00" * 32], [], ["--prompt", "-"], ["--prompt", "-", "--digest", stored.digests[0]]):
        for command in ("locate", "prefetch"):
            assert say(command, *wrong).code == 2, (command, wrong)


# ---------------------------------------------------------------- verify


def test_a_damaged_copy_is_found_named_and_gone(sidecar: Sidecar, client: Client, say: Any) -> None:
    stored = Stored(client, 2)
    words, done = both(say, stored, "verify", "--model", stored.name)
    assert words == {"dram: read": 2, "nvme: read": 2}
    assert done.code == 0
    assert say("move", "--model", stored.name, "--to", "nvme", "--yes").code == 0
    body = random_cache(stored.spec, 2 * STEP, stored.number)[0][0][:, STEP:].tobytes()[:64]
    flipped = 0
    for path in sidecar.directory.rglob("region-*.kvs"):
        data = path.read_bytes()
        at = data.find(body)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([body[0] ^ 1]))
            flipped += 1
    assert flipped == 1
    found = say("verify", "--model", stored.name, "--tier", "nvme", "--json")
    assert found.code == 8
    assert found.json["outcomes"]["nvme: damaged"]["chunk_count"] == 1
    assert stored.digests[1] in found.json["problem"]
    assert client.stats().counters["quarantined_chunks"] == 1
    assert stored.hit_count == STEP


def test_a_copy_that_was_altered_in_a_shared_tier_is_found(redis: RedisServer, client: Client, say: Any) -> None:
    stored = Stored(client, 2)
    with redis.client() as engine:
        before = set(engine.scan_iter(_type="hash"))
        assert say("move", "--model", stored.name, "--to", "redis", "--keep").code == 0
        fresh = sorted(set(engine.scan_iter(_type="hash")) - before)
        assert len(fresh) == 2
        assert say("verify", "--model", stored.name, "--tier", "redis").code == 0
        field, value = max(engine.hgetall(fresh[0]).items(), key=lambda each: len(each[1]))
        engine.hset(fresh[0], field, bytes([value[0] ^ 1]) + value[1:])
    done = say("verify", "--model", stored.name, "--tier", "redis", "--json")
    assert done.code == 8
    assert done.json["outcomes"]["redis: damaged"]["chunk_count"] == 1
    assert sorted(len(each["copies"]) for each in chunks_of(say, stored.name).values()) == [2, 3]
    with redis.client() as engine:
        engine.delete(fresh[1])  # as one that needs room does: no fault
    done = say("verify", "--model", stored.name, "--tier", "redis", "--json")
    counts = {word: each["chunk_count"] for word, each in done.json["outcomes"].items()}
    assert (counts, done.json["problem"], done.code) == ({"gone meanwhile": 1}, "", 0)
    assert stored.hit_count == 2 * STEP


# ---------------------------------------------------------------- drain


def test_a_drained_tier_is_emptied_and_takes_no_more_until_that_is_ended(client: Client, say: Any) -> None:
    assert say("evict", "--all", "--yes").code == 0
    stored = Stored(client, 2, tail=3)
    words, done = both(say, stored, "drain", "--tier", "nvme", "--yes")
    assert words == {
        "written": 2, "given up by faster tiers": 2, "no longer durable": 2, "has nowhere slower to go": 1,
    }  # fmt: skip
    assert done.code == 10
    assert say("tiers", "--json").json["tiers"][1]["is_draining"]
    assert "kvstore drain --tier NAME --end" in client.stats().tier_problem
    late = Stored.__new__(Stored)
    vars(late).update(vars(stored))
    late.tokens = tokens_of(STEP, 999)
    receipt = client.store(late.spec, late.tokens, random_cache(late.spec, STEP, 999))
    assert receipt.wait(2) is Durability.MEMORY
    ended = say("drain", "--tier", "nvme", "--end")
    assert (ended.code, ended.err) == (0, "")  # no progress, and no line of it, where nobody sits
    assert "nvme takes chunks again" in ended.out
    assert client.store(late.spec, late.tokens, random_cache(late.spec, STEP, 999)).wait(20) is Durability.LOCAL
    assert stored.hit_count == len(stored.tokens)
    assert say("drain").code == 0
    eventually(lambda: "no chunk waits to be written" in say("drain").out)
    eventually(lambda: client.stats().backlog_chunk_count == 0)  # uses are told late, and may send chunks on
