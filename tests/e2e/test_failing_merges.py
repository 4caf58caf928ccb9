"""Partial prefills of which the fetches fail, each in turn: what comes is the merge that was asked for, or the prompt
computed in full; never holes, and nothing that is made of them is stored. Memory to merge in is NaN before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

import pytest
import torch
from kvstore_client import Client, Exactness, ModelSpec, Recompute, connect
from kvstore_client.copying import Copier
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.planes.shared_memory import landing
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_client.recompute import PartialPrefill, Recomputed, arrivals, fused, merged, recompute
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DataLoss, InvalidRequest, Unavailable
from kvstore.seams import WorkerThreads
from kvstore.spec import Durability
from tests.faulty_workers import WAYS, FaultyWorkers
from tests.recompute.models import LAYERS, VOCABULARY, model_of, prompt, sibling_of
from tests.specs import bits, random_cache, tokens_of

STEP = 16
WAIT_S = 20.0
REFILL_COUNT_MAX = 5
MODEL = model_of("qwen3", max_position_embeddings=1024)
RECEIVER = TransformersRunner(MODEL, chunk_tokens=STEP)
SENDER = TransformersRunner(sibling_of(MODEL, 3), chunk_tokens=STEP)
KEEPER = TransformersRunner(
    MODEL, spec=replace(ModelSpec.from_transformers(MODEL.config, MODEL, STEP, keeps_e=True), model_id="keeper")
)
FUSED = Recompute(1, 1, 0.25, "product")
_seeds = count(7000)


@dataclass(frozen=True)
class Scene:
    """A prompt of which something is stored, and the call that reuses it. ``samples``: bytes of the last layer of each
    thing that is stored."""

    runner: TransformersRunner
    tokens: torch.Tensor
    options: dict[str, Any]
    samples: list[bytes]

    def prefill(self, client: Client) -> PartialPrefill:
        return client.partial_prefill(self.runner, self.tokens, **self.options)


def computed(runner: TransformersRunner, tokens: torch.Tensor) -> Recomputed:
    return recompute(runner, tokens, [], Recompute.full(LAYERS), hidden_layers=range(LAYERS))


def keep(client: Client, runner: TransformersRunner, tokens: torch.Tensor, *hidden: int, alone: bool = False) -> bytes:
    """Store what a runner computes. Returns some bytes of its last layer."""
    made = computed(runner, tokens)
    store = client.store_segment if alone else client.store
    kept: Any = [made.hidden[layer] for layer in range(LAYERS)] if runner.spec.keeps_e else made.kv
    e = {layer: made.hidden[layer] for layer in hidden}
    receipt = store(runner.spec, tokens, kept, hidden=e or None)
    assert receipt.wait(WAIT_S) >= Durability.MEMORY, receipt.reason
    last = made.hidden[LAYERS - 1] if runner.spec.keeps_e else made.kv[LAYERS - 1][0][0]
    return last[:4].contiguous().numpy().tobytes()


def exact_prefix(client: Client) -> Scene:
    tokens = prompt(60, next(_seeds))
    return Scene(RECEIVER, tokens, {}, [keep(client, RECEIVER, tokens[:53])])


def kept_e(client: Client) -> Scene:
    tokens = prompt(60, next(_seeds))
    return Scene(KEEPER, tokens, {}, [keep(client, KEEPER, tokens[:53])])


def siblings_behind_a_prefix(client: Client) -> Scene:
    """With E of the transition layer, ahead of the rest."""
    tokens = prompt(70, next(_seeds))
    samples = [keep(client, SENDER, tokens[:64], 1), keep(client, RECEIVER, tokens[:20])]
    return Scene(RECEIVER, tokens, {"senders": [SENDER.spec], "recompute": FUSED}, samples)


def documents_elsewhere(client: Client) -> Scene:
    one, two, rest = (prompt(size, next(_seeds)) for size in (37, 21, 12))
    samples = [keep(client, RECEIVER, document, 1, alone=True) for document in (one, two)]
    tokens = torch.cat((two, rest[:3], one, rest[3:]))
    return Scene(RECEIVER, tokens, {"segments": [(0, 21), (24, 61)], "recompute": Recompute(1, 1, 0.3)}, samples)


SCENES = (exact_prefix, kept_e, siblings_behind_a_prefix, documents_elsewhere)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that nobody wrote is seen. Each layer is copied by itself, as large ones are."""
    monkeypatch.setattr(landing, "JOB_BYTES", 1)
    real = merged.dense_planes

    def planes(*args: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        made = real(*args)
        for pair in made:
            for plane in pair:
                plane.fill_(torch.nan)
        return made

    for room in (arrivals, fused):
        monkeypatch.setattr(room, "dense_planes", planes)


class Rig:
    """A client whose copies fail as they are told, and another one that looks."""

    def __init__(self, address: str) -> None:
        self.client, self.other = connect(address, timeout_s=WAIT_S), connect(address, timeout_s=WAIT_S)
        context = self.client._context
        context.copier.close()
        self.copies = FaultyWorkers(WorkerThreads(2, "test-copy"))
        self.client._context = replace(context, copier=Copier(self.copies))

    def close(self) -> None:
        self.client.close()
        self.other.close()


@pytest.fixture
def rig(sidecar: Sidecar) -> Iterator[Rig]:
    rig = Rig(sidecar.address)
    yield rig
    rig.close()


def planes_of(found: Recomputed) -> list[torch.Tensor]:
    return [found.logits, *(plane for pair in found.kv for plane in pair)]


def same(ours: Recomputed, theirs: Recomputed) -> bool:
    """To the bit."""
    pairs = zip(planes_of(ours), planes_of(theirs), strict=True)
    return ours.exactness is theirs.exactness and all(torch.equal(one, two) for one, two in pairs)


def assert_whole(found: PartialPrefill, scene: Scene, wanted: PartialPrefill) -> None:
    """The merge that was asked for; less of it, as far as it is exact; or a full prefill that says that it is one."""
    if found.plan.runs == wanted.plan.runs:
        assert same(found, wanted)
    elif found.plan.runs:
        assert all(run.is_exact for run in found.plan.runs)
        assert found.plan.reason
        assert found.exactness is Exactness.EXACT
        for ours, theirs in zip(planes_of(found), planes_of(computed(scene.runner, scene.tokens)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)
    else:
        assert "computed in full" in found.plan.reason
        assert found.exactness is Exactness.EXACT
        assert same(found, computed(scene.runner, scene.tokens))


def assert_kept_as_it_is(rig: Rig, scene: Scene, found: PartialPrefill) -> None:
    """What is stored of it is found as what it is, and by nobody as anything better."""
    if scene.runner.spec.keeps_e:
        return
    if found.exactness is not Exactness.EXACT:
        with pytest.raises(InvalidRequest, match="DERIVED"):
            rig.client.store(scene.runner.spec, scene.tokens, found.kv)
    receipt = rig.client.store(scene.runner.spec, scene.tokens, found.kv, exactness=found.exactness)
    assert receipt.wait(WAIT_S) >= Durability.MEMORY
    kept = rig.other.fetch(scene.runner.spec, scene.tokens, exactness=found.exactness, verify=True)
    assert kept.token_count == len(scene.tokens)
    for ours, theirs in zip(kept, found.kv, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert (bits(one) == bits(two)).all()


def assert_given_back(rig: Rig) -> None:
    """Leases and tickets, once nobody waits for them."""
    ends = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        held = rig.other.stats().sessions
        if (held.ticket_count, held.lease_count) == (0, 0):
            return
        ends.wait(0.05)
    raise AssertionError(f"still held: {held}")


@pytest.mark.parametrize("make", SCENES, ids=lambda make: make.__name__)
def test_a_merge_of_which_a_copy_fails_has_no_holes(rig: Rig, make: Callable[[Client], Scene]) -> None:
    if rig.client.plane == "remote":
        pytest.skip("by the remote plane the transfer's own thread copies: the next test fails it")
    scene = make(rig.other)
    rig.copies.names.clear()
    wanted = scene.prefill(rig.client)
    jobs = len(rig.copies.names)
    assert wanted.plan.runs, wanted.plan.reason
    assert jobs >= LAYERS
    for target in range(jobs):
        rig.copies.fail(WAYS[target % len(WAYS)], target)
        found = scene.prefill(rig.client)
        assert rig.copies.hit
        assert not found.plan.runs, "a copy that failed counts as done"
        assert_whole(found, scene, wanted)
    again = scene.prefill(rig.client)
    assert again.plan.runs
    assert_whole(again, scene, wanted)
    assert_given_back(rig)
    assert_kept_as_it_is(rig, scene, again)


class Nth:
    """Something happens when a client copies for the nth time."""

    def __init__(self, client: Client, target: int, act: Callable[[], None]) -> None:
        self.count = 0
        self._target, self._act = target, act
        client.faults.arm("fetch.copy.middle", self._reach)

    def _reach(self) -> None:
        number, self.count = self.count, self.count + 1
        if number == self._target:
            self._act()


def lose() -> None:
    raise DataLoss("lost, says the test")


def fall_over() -> None:
    raise MemoryError


@pytest.mark.parametrize("make", SCENES, ids=lambda make: make.__name__)
def test_a_merge_whose_transfer_ends_in_any_layer_is_computed_in_full(
    rig: Rig, make: Callable[[Client], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind layers that are said to have landed, and are merged: here the first is computed before one fails."""
    scene = make(rig.other)
    was_computed = threading.Event()
    finish = scene.runner.finish

    def finishing(*args: Any) -> Any:
        was_computed.set()
        return finish(*args)

    monkeypatch.setattr(scene.runner, "finish", finishing)
    seen = Nth(rig.client, -1, lose)
    wanted = scene.prefill(rig.client)
    assert seen.count >= LAYERS
    late = seen.count - 1
    for target in range(seen.count):

        def act(target: int = target) -> None:
            if target == late:
                was_computed.wait(0.5)  # some scenes load all before they compute
            (lose, fall_over)[target % 2]()

        was_computed.clear()
        Nth(rig.client, target, act)
        found = scene.prefill(rig.client)
        assert not found.plan.runs, "a layer that was lost counts as landed"
        assert_whole(found, scene, wanted)
    rig.client.faults.arm("fetch.copy.middle", lambda: None)
    assert_given_back(rig)
    assert_kept_as_it_is(rig, scene, found)


@pytest.mark.parametrize("make", SCENES, ids=lambda make: make.__name__)
def test_a_merge_for_which_a_thread_cannot_be_had_is_computed_in_full(
    rig: Rig, make: Callable[[Client], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(rig.other)
    wanted = scene.prefill(rig.client)
    real = threading.Thread.start
    target, hits = 0, 0
    while True:
        begun = count()

        def start(thread: threading.Thread, begun: Any = begun, target: int = target) -> None:
            if thread.name.startswith("kvstore") and next(begun) == target:
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        try:
            found = scene.prefill(rig.client)
        except Unavailable:
            found = None
        finally:
            monkeypatch.setattr(threading.Thread, "start", real)
        if found is not None:
            assert_whole(found, scene, wanted)
        if next(begun) <= target:
            break
        hits += 1
        target += 1
    assert hits, "no thread of ours was refused"
    assert_given_back(rig)


def test_a_merge_whose_chunks_are_given_to_others_under_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are revoked for their age, and the memory refilled, while the first layer, a middle one or the last is
    being copied. Tickets name no places: who copies from these has no lease."""
    monkeypatch.setattr(MappedSession, "maps_chunks", False)
    environment = {**os.environ, "KVSTORE__LIMITS__LEASE_AGE_S_MAX": "0"}
    spec, size = RECEIVER.spec, 64 * STEP
    with Sidecar("--capacity", "1 MiB", environment=environment) as sidecar:
        rig = Rig(sidecar.address)

        def revoked() -> int:
            return int(rig.other.stats().counters["leases_revoked"])

        refills: list[int] = []

        def refill() -> None:
            """All the memory there is: until the lease is taken back for it."""
            before = revoked()
            for _ in range(REFILL_COUNT_MAX):
                seed = next(_seeds)
                receipt = rig.other.store(spec, tokens_of(size, seed, VOCABULARY), random_cache(spec, size, seed))
                assert receipt.wait(WAIT_S) is Durability.MEMORY
                if revoked() > before:
                    break
            refills.append(revoked() - before)

        lost = 0
        for make, share in product(SCENES, (0.0, 0.5, 1.0)):
            scene = make(rig.other)
            seen = Nth(rig.client, -1, lose)
            wanted = scene.prefill(rig.client)
            assert wanted.plan.runs
            Nth(rig.client, int((seen.count - 1) * share), refill)
            found = scene.prefill(rig.client)
            assert_whole(found, scene, wanted)
            assert refills.pop() > 0, "the lease was not taken back"
            lost += found.plan.runs != wanted.plan.runs  # where another thread was faster, all had been copied
        assert lost > len(SCENES), "memory that was somebody else's counts"
        rig.close()


@pytest.mark.parametrize("make", [kept_e, siblings_behind_a_prefix], ids=lambda make: make.__name__)
def test_a_merge_whose_sidecar_is_killed_under_the_copy(own_sidecar: Sidecar, make: Callable[[Client], Scene]) -> None:
    rig = Rig(own_sidecar.address)
    scene = make(rig.other)
    seen = Nth(rig.client, -1, lose)
    wanted = scene.prefill(rig.client)
    Nth(rig.client, seen.count // 2, lambda: own_sidecar.stop(kill=True))
    assert_whole(scene.prefill(rig.client), scene, wanted)
    rig.close()


def spoil(sidecar: Sidecar, samples: list[bytes]) -> None:
    """Turn a bit of each of these wherever it lies on the device."""
    spoiled = 0
    for path in sidecar.directory.rglob("region-*.kvs"):
        data = bytearray(path.read_bytes())
        for sample in samples:
            place = data.find(sample)
            while place >= 0:
                data[place] ^= 1
                spoiled += 1
                place = data.find(sample, place)
        path.write_bytes(data)
    assert spoiled >= len(samples)


def test_a_merge_of_chunks_that_are_corrupt_on_the_device() -> None:
    """They are quarantined on their way, behind layers that came: what was found and does not come is computed."""
    unseen = {**os.environ, "KVSTORE__POLICY__SCRUB_BYTES_PER_S": "0"}  # a scrub would find them first
    with Sidecar("--capacity", "16 MiB", nvme="32 MiB", environment=unseen) as sidecar:
        with connect(sidecar.address) as client:
            scenes = [make(client) for make in SCENES]
            wanted = [scene.prefill(client) for scene in scenes]
        sidecar.stop()
        spoil(sidecar, [sample for scene in scenes for sample in scene.samples])
        sidecar.start()
        rig = Rig(sidecar.address)
        for scene, merge in zip(scenes, wanted, strict=True):
            assert merge.plan.runs
            found = scene.prefill(rig.client)
            assert_whole(found, scene, merge)
            assert not found.plan.runs
        assert_given_back(rig)
        assert rig.other.stats().counters["quarantined_chunks"] >= len(scenes)
        rig.close()
