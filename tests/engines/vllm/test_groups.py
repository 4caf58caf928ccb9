"""Layers with block tables of their own, without vLLM: blocks that have left a window are neither read nor written."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_client.store.writer import StoreWriter
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from tests.engines.vllm.engine import BLOCK, SPEC, Engine, Tables, matched, request, scheduled, wait_stored
from tests.server.raw import eventually
from tests.specs import tokens_of

WINDOW = 16  # four blocks, and a chunk
GROUPS = (LayerGroup(0, (0,), BLOCK), LayerGroup(1, (1,), BLOCK, WINDOW))
FULL, WINDOWED = range(2)


@pytest.fixture
def hybrid(sidecar: Sidecar) -> Iterator[Engine]:
    """An engine whose second layer has a window, and blocks of its own."""
    made = Engine(sidecar.address, groups=GROUPS)
    yield made
    made.close()


def tables(count: int, computed: int = 0, first: int = 1) -> Tables:
    """The blocks of a request of ``count`` tokens as vLLM has them once ``computed`` are computed: in the windowed
    group the null block stands for those that no later token attends to. The two groups' blocks interleave."""
    total, gone = -(-count // BLOCK), max(0, computed - WINDOW + 1) // BLOCK
    every = list(range(first, first + 2 * total))
    return every[::2], [0] * gone + every[2 * gone + 1 :: 2]


def written(engine: Engine, blocks: Tables, seed: int) -> list[Any]:
    """Compute: per layer other numbers into its blocks. [layers][tokens, heads, content]"""
    made = torch.Generator().manual_seed(seed)
    for layer, table in enumerate(blocks):
        pages = engine.pages[layer]
        values = torch.randn((len(table), *pages.shape[1:]), generator=made).to(pages.dtype)
        for block, value in zip(table, values, strict=True):
            if block:
                pages[block] = value
    return content(engine, blocks)


def content(engine: Engine, blocks: Tables) -> list[Any]:
    return [engine.pages[layer][table].transpose(1, 2).flatten(0, 1) for layer, table in enumerate(blocks)]


def fetched(engine: Engine, tokens: Any, count: int) -> list[Any]:
    """What is kept of a prompt, in the form of ``content``."""
    found = engine.clients[0].fetch(SPEC, tokens)
    assert found.token_count == count
    return [torch.cat([k, v], -1).transpose(0, 1) for k, v in found]


def keep(engine: Engine, tokens: Any, blocks: Tables, seed: int) -> list[Any]:
    """Compute a whole prompt, and wait until it is kept."""
    asked = request(f"keep-{seed}", tokens)
    assert engine.admit(asked, blocks) == 0
    filled = written(engine, blocks, seed)
    for save in engine.compute(asked, blocks, 0, asked.num_tokens).saves:
        wait_stored(engine.clients[0], save)
    engine.scheduler.finished(asked.request_id)
    return filled


def test_a_load_fills_the_blocks_that_each_group_has(hybrid: Engine) -> None:
    tokens = tokens_of(58, 500)
    filled = keep(hybrid, tokens, tables(58), 500)
    null = [pages[0].clone() for pages in hybrid.pages]
    for number, had in enumerate((0, 20, 44)):
        blocks = tables(58, 56, first=33)
        before = [pages.clone() for pages in hybrid.pages]
        asked = request(f"b{number}", tokens)
        assert hybrid.admit(asked, blocks, had) == 56 - had
        hybrid.worker.begin(hybrid.scheduler.step(scheduled("x", ([], []), 0, 0)))
        assert hybrid.landed() == {f"b{number}"}
        assert hybrid.worker.failed_requests() == set()
        ours = content(hybrid, blocks)
        assert torch.equal(ours[FULL][had:56], filled[FULL][had:56])
        start = max(had, 56 - WINDOW)
        assert torch.equal(ours[WINDOWED][start:56], filled[WINDOWED][start:56])
        for pages, old, table in zip(hybrid.pages, before, blocks, strict=True):
            others = [block for block in range(len(pages)) if block not in table[had // BLOCK : 14]]
            assert torch.equal(pages[others], old[others]), "and no other block"
        hybrid.scheduler.finished(asked.request_id)
        for pages in hybrid.pages:
            pages[33:] = 0
    assert all(torch.equal(pages[0], old) for pages, old in zip(hybrid.pages, null, strict=True))


def test_a_prefill_in_pieces_is_kept_while_its_blocks_are_there(hybrid: Engine) -> None:
    """vLLM gives those that have left the window to others, who write to them."""
    tokens = tokens_of(75, 501)
    asked, whole = request("a", tokens), tables(75)
    hybrid.admit(asked, whole)
    filled = written(hybrid, whole, 501)
    kept = []
    for start, stop in ((0, 20), (20, 31), (31, 32), (32, 55), (55, 75)):
        now = tables(75, start)
        for block in set(whole[WINDOWED]) - set(now[WINDOWED]):
            hybrid.pages[WINDOWED][block] = 7.0
        first, last = -(-start // BLOCK), -(-stop // BLOCK)
        new = tuple(table[first:last] for table in whole)
        step = hybrid.compute(asked, new, start, stop - start, is_new=start == 0, tables=now)
        kept += [(save.start, save.tokens.size) for save in step.saves]
        for save in step.saves:
            assert 0 not in save.block_ids[WINDOWED]
            wait_stored(hybrid.clients[0], save)
    assert kept == [(0, 16), (16, 32), (16, 48), (48, 72)]
    for ours, theirs in zip(fetched(hybrid, tokens, 72), filled, strict=True):
        assert torch.equal(ours, theirs[:72])


def test_what_a_step_computes_whole_is_kept_whole(hybrid: Engine) -> None:
    """However long it is: its blocks are there until a later step."""
    tokens = tokens_of(75, 502)
    filled = keep(hybrid, tokens, tables(75), 502)
    for ours, theirs in zip(fetched(hybrid, tokens, 72), filled, strict=True):
        assert torch.equal(ours, theirs[:72])


def test_of_a_hit_of_vllms_own_the_rest_is_kept_behind_what_is_stored(hybrid: Engine) -> None:
    """A hit in a windowed group has null blocks at its beginning."""
    tokens = tokens_of(75, 503)
    keep(hybrid, tokens[:48], tables(48), 503)
    asked, blocks = request("b", tokens), tables(75, 48, first=25)
    assert hybrid.admit(asked, blocks, 48) == 0
    filled = written(hybrid, blocks, 504)
    (save,) = hybrid.compute(asked, blocks, 48, 27).saves
    assert (save.start, save.tokens.size) == (32, 72)
    wait_stored(hybrid.clients[0], save)
    for ours, theirs in zip(fetched(hybrid, tokens, 72), filled, strict=True):
        assert torch.equal(ours[48:], theirs[48:72])


def test_behind_a_chunk_that_is_missing_nothing_is_kept(
    own_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The sidecar keeps no chunk without those before it, and nothing is copied for it."""
    hybrid = Engine(own_sidecar.address, groups=GROUPS)
    put: list[int] = []
    monkeypatch.setattr(StoreWriter, "put_layer", lambda *_, **how: put.append(how["token_start"]))
    tokens = tokens_of(75, 505)
    asked, blocks = request("b", tokens), tables(75, 48, first=25)
    assert hybrid.admit(asked, blocks, 48) == 0
    for start, stop in ((48, 68), (68, 75)):
        new = blocks if start == 48 else ([], [])
        now = tables(75, start, first=25)
        assert hybrid.compute(asked, new, start, stop - start, is_new=start == 48, tables=now).saves
    assert not put
    assert not hybrid.clients[0].stats().sessions.reservation_count
    assert hybrid.clients[0].lookup(SPEC, tokens).prefix_token_count == 0
    hybrid.close()


def test_what_another_request_of_the_step_keeps_is_not_missing(hybrid: Engine) -> None:
    """vLLM's prefix cache has blocks that the same step computes: many prompts begin alike, and come at once."""
    tokens = tokens_of(75, 514)
    first, second = request("a", tokens[:50]), request("b", tokens)
    mine = tables(50)
    theirs = mine[FULL][:12] + tables(27, 0, 40)[FULL], [0] * 8 + mine[WINDOWED][8:12] + tables(27, 0, 40)[WINDOWED]
    filled = written(hybrid, mine, 514)
    hybrid.admit(first, mine)
    hybrid.admit(second, theirs, 48)
    for layer, table in enumerate(theirs):
        hybrid.pages[layer][table[12:]] = torch.randn(hybrid.pages[layer][table[12:]].shape).to(torch.bfloat16)
    step = hybrid.scheduler.step(both(scheduled("a", mine, 0, 50), scheduled("b", theirs, 48, 27)))
    assert [(save.start, save.tokens.size) for save in step.saves] == [(0, 48), (32, 72)]
    hybrid.worker.save(step.saves)
    wait_stored(hybrid.clients[0], step.saves[1])
    ours = content(hybrid, theirs)
    for layer, found in enumerate(fetched(hybrid, tokens, 72)):
        assert torch.equal(found[:48], filled[layer][:48])
        assert torch.equal(found[48:], ours[layer][48:72])


def both(one: Any, other: Any) -> Any:
    """A step of both requests."""
    states = {each.scheduled_new_reqs[0].req_id: each.kv_connector_block_state for each in (one, other)}
    state = SimpleNamespace(resolve_block_ids=lambda name: states[name].resolve_block_ids(name))
    return SimpleNamespace(
        scheduled_new_reqs=[*one.scheduled_new_reqs, *other.scheduled_new_reqs],
        num_scheduled_tokens={**one.num_scheduled_tokens, **other.num_scheduled_tokens},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        kv_connector_block_state=state,
    )  # fmt: skip


def test_a_null_block_is_never_read_for_a_chunk(hybrid: Engine) -> None:
    """Whatever made vLLM free it: should it ever free more than it does now, chunks are missed."""
    tokens = tokens_of(64, 507)
    asked, blocks = request("a", tokens), tables(64)
    hybrid.admit(asked, blocks)
    written(hybrid, blocks, 507)
    early = blocks[FULL], [0, *blocks[WINDOWED][1:]]
    assert hybrid.compute(asked, blocks, 0, 20, tables=early).saves == []


def test_without_vllms_tables_nothing_is_kept(hybrid: Engine) -> None:
    blocks = tables(64)
    asked = request("a", tokens_of(64, 515))
    hybrid.admit(asked, blocks)
    step = scheduled("a", blocks, 0, 64)
    del step.kv_connector_block_state
    assert hybrid.scheduler.step(step).saves == []


def test_a_load_that_fails_is_told_by_its_request(hybrid: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM cannot tell whose a block is, where there are several tables."""
    monkeypatch.setattr(MappedSession, "maps_chunks", False)  # loads take calls
    tokens = tokens_of(58, 508)
    keep(hybrid, tokens, tables(58), 508)
    asked, blocks = request("b", tokens), tables(58, 56, first=33)
    assert hybrid.admit(asked, blocks) == 56
    step = hybrid.scheduler.step(scheduled("x", ([], []), 0, 0))
    hybrid.clients[0].release_ticket(step.loads[0].ticket)
    hybrid.worker.begin(step)
    assert hybrid.landed() == {"b"}
    assert (hybrid.worker.failed_blocks(), hybrid.worker.failed_requests()) == (set(), {"b"})
    assert hybrid.worker.failed_requests() == set(), "once"
    report = SimpleNamespace(invalid_block_ids=set(), finished_recving={"b"}, failed_recving={"b"})
    assert hybrid.scheduler.received(report) == set()
    assert matched(hybrid.scheduler, asked, 0) == (0, False)
    fresh = tables(58, first=25)
    hybrid.scheduler.allocated(asked, fresh, 0)
    (save,) = hybrid.compute(asked, fresh, 0, 58).saves
    assert (save.start, save.tokens.size) == (0, 56)


def test_a_load_of_which_a_part_cannot_begin_has_failed(hybrid: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it has ended when it is told: nothing writes to the blocks any more."""
    tokens = tokens_of(58, 509)
    keep(hybrid, tokens, tables(58), 509)
    assert hybrid.admit(request("b", tokens), tables(58, 56, first=33)) == 56
    step = hybrid.scheduler.step(scheduled("x", ([], []), 0, 0))
    begin, begun = hybrid.clients[1].start_fetch, []

    def start_fetch(*args: Any, **how: Any) -> Any:
        if begun:
            begun[0].wait(10.0)  # what came is of no use without the rest
            raise InvalidRequest("no")
        begun.append(begin(*args, **how))
        return begun[0]

    monkeypatch.setattr(hybrid.clients[1], "start_fetch", start_fetch)
    hybrid.worker.begin(step)
    assert hybrid.landed() == {"b"}
    assert begun[0].is_done
    assert hybrid.worker.failed_requests() == {"b"}


def test_a_load_holds_what_each_group_fetches(own_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing once they have."""
    monkeypatch.setattr(MappedSession, "maps_chunks", False)  # loads take calls, which only what is held answers
    hybrid = Engine(own_sidecar.address, groups=GROUPS)
    tokens = tokens_of(58, 510)
    keep(hybrid, tokens, tables(58), 510)
    assert hybrid.admit(request("b", tokens), tables(58, 56, first=33)) == 56
    hybrid.worker.begin(hybrid.scheduler.step(scheduled("x", ([], []), 0, 0)))
    assert hybrid.landed() == {"b"}
    assert hybrid.worker.failed_requests() == set()
    eventually(lambda: not hybrid.clients[0].stats().sessions.ticket_count)
    hybrid.close()


def test_a_step_names_the_blocks_of_all_groups_that_it_may_write(hybrid: Engine) -> None:
    """A save of before still reads some of them, perhaps."""
    step = hybrid.scheduler.step
    assert step(scheduled("new", ([1, 3], [2, 4]), 5, 3)).written == [3, 4]
    assert step(scheduled("new", ([5], [6]), 8, 4, is_new=False)).written == [5, 6]
    tokens = tokens_of(58, 511)
    keep(hybrid, tokens, tables(58), 511)
    blocks = tables(58, 56, first=33)
    assert hybrid.admit(request("b", tokens), blocks, 20) == 36
    assert step(scheduled("x", ([], []), 0, 0)).written == [*blocks[FULL][5:], *blocks[WINDOWED][5:]]


def test_a_load_has_ended_when_all_of_it_has(hybrid: Engine) -> None:
    tokens = tokens_of(58, 512)
    keep(hybrid, tokens, tables(58), 512)
    assert hybrid.admit(request("b", tokens), tables(58, 56, first=33)) == 56
    hybrid.worker.begin(hybrid.scheduler.step(scheduled("x", ([], []), 0, 0)))
    moving = hybrid.worker._moving["b"]
    for each in moving.transfers:
        each.wait(10.0)
    last, writes = moving.transfers[1], SimpleNamespace(is_done=False, failed=False, error=None)
    moving.transfers[1] = writes  # type: ignore[call-overload]  # it stands in for one
    assert hybrid.worker.landed() == set()
    moving.transfers[1] = last
    assert hybrid.worker.landed() == {"b"}


def test_a_save_gives_way_in_each_group(hybrid: Engine) -> None:
    tokens, blocks = tokens_of(58, 513), tables(58)
    asked = request("a", tokens)
    hybrid.admit(asked, blocks)
    (save,) = hybrid.scheduler.step(scheduled("a", blocks, 0, 58)).saves
    assert save.reads({blocks[FULL][0]})
    assert save.reads({blocks[WINDOWED][13]})
    assert not save.reads({0, blocks[FULL][14], blocks[WINDOWED][14]})
