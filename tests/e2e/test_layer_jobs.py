"""Layer by layer: small layers are copied together, each is handed out once it is good, and the bytes are right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvstore_client import Client, Paged, connect
from kvstore_client.copying import Copier
from kvstore_client.fetch import stream
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.planes.shared_memory import landing
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DataLoss
from kvstore.seams import SystemClock
from kvstore.spec import Exactness, LayerSpec, MissReason, ModelSpec, Tier
from tests.specs import bits, random_cache, small_spec, tokens_of

LAYERS = (LayerSpec(kv_heads=2, k_dim=8, v_dim=8),) * 7
ALIKE = small_spec(layers=LAYERS)
UNLIKE = small_spec(
    weights_digest="cd" * 32,
    layers=tuple(LayerSpec(kv_heads=1 + number % 2, k_dim=8, v_dim=8) for number in range(7)),
)
KEEPS_E = small_spec(
    weights_digest="ef" * 32, layers=LAYERS, hidden_size=24, hidden_dtype="bfloat16", keeps_e=True
)  # fmt: skip
COUNT = 56
"""Three whole chunks, and a partial one."""


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    """Local: on the remote plane the thread that receives strips copies them, too."""
    with Sidecar("--capacity", "16 MiB") as running:
        yield running


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, timeout_s=10.0) as connected:
        yield connected


@pytest.fixture(params=["torch", "numpy"])
def arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has imported torch, or has not: the copies of layers are others."""
    if request.param == "torch":
        assert sys.modules["torch"] is torch
    else:
        monkeypatch.delitem(sys.modules, "torch")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The positions of the layers of each job."""
    seen: list[range] = []
    submit = Copier.submit

    def noted(self: Copier, function: object, *args: object) -> Future[object]:
        if args and isinstance(args[0], range):
            seen.append(args[0])
        return submit(self, function, *args)  # type: ignore[arg-type]  # any call is passed on as it is

    monkeypatch.setattr(Copier, "submit", noted)
    return seen


def stored(client: Client, spec: ModelSpec, seed: int) -> tuple[np.ndarray, list]:
    tokens = tokens_of(COUNT, seed)
    if spec.keeps_e:
        chance = np.random.default_rng(seed)
        cache = [chance.integers(0, 1 << 15, (COUNT, spec.hidden_size), np.uint16) for _ in spec.layers]
    else:
        cache = random_cache(spec, COUNT, seed)
    client.store(spec, tokens, cache).wait(10)
    return tokens, cache


def planes(layer: object) -> Sequence[object]:
    return layer if isinstance(layer, tuple) else (layer,)


def same(found: Sequence[object], cache: Sequence[object]) -> bool:
    layers = [zip(planes(got), planes(want), strict=True) for got, want in zip(found, cache, strict=True)]
    return all((bits(got) == bits(want)).all() for layer in layers for got, want in layer)


@pytest.mark.usefixtures("arrays")
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("spec", [ALIKE, UNLIKE, KEEPS_E], ids=["alike", "unlike", "keeps E"])
@pytest.mark.parametrize(("layers_a_job", "job_count"), [(1, 7), (3, 3), (7, 1), (100, 1)])
def test_layers_of_every_size_of_job(
    client: Client, jobs: list[range], monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, layers_a_job: int,
    job_count: int, verify: bool,
) -> None:  # fmt: skip
    tokens, cache = stored(client, spec, seed=layers_a_job)
    total = client.fetch(spec, tokens).byte_count
    monkeypatch.setattr(landing, "JOB_BYTES", -(-total * layers_a_job // 7))
    jobs.clear()
    found = list(client.fetch_layers(spec, tokens, verify=verify))
    assert [layer for layer, _ in found] == list(range(7))
    assert same([planes(entry) for _, entry in found], [planes(each) for each in cache])
    assert len(jobs) == job_count
    assert [position for job in jobs for position in job] == list(range(7)), "each layer once"

    jobs.clear()
    transfer = client.start_fetch(client.lookup(spec, tokens, hold=True, readers=1).ticket, verify=verify)
    transfer.wait(10)
    assert same([planes(transfer.wait_layer(layer)) for layer in range(7)], [planes(each) for each in cache])
    assert len(jobs) == job_count


@pytest.mark.usefixtures("arrays")
@pytest.mark.parametrize("layers_a_job", [1, 3, 7])
def test_layers_into_the_callers_memory(
    client: Client, jobs: list[range], monkeypatch: pytest.MonkeyPatch, layers_a_job: int
) -> None:
    tokens, cache = stored(client, ALIKE, seed=50 + layers_a_job)
    total = client.fetch(ALIKE, tokens).byte_count
    monkeypatch.setattr(landing, "JOB_BYTES", -(-total * layers_a_job // 7))
    some = [5, 1, 2]
    into = [tuple(np.zeros_like(half) for half in cache[layer]) for layer in some]
    list(client.fetch_layers(ALIKE, tokens, layers=some, into=into))
    assert same(into, [cache[layer] for layer in some])

    pages = [np.zeros((2, 9, 8, 2, 8), np.uint16) for _ in LAYERS]
    slots = np.arange(COUNT) + 8
    list(client.fetch_layers(ALIKE, tokens, into=Paged(pages, slots)))
    for layer, each in enumerate(pages):
        halves = each.reshape(2, 72, 2, 8)[:, slots].transpose(0, 2, 1, 3)
        assert same([tuple(halves)], [tuple(map(bits, cache[layer]))])
    assert max(map(len, jobs)) == layers_a_job


class Arriving:
    """A prefix of three layers, copied together at once. More of the last one may be still to come."""

    reason, exactness, tier, token_count, is_leased = MissReason.NONE, Exactness.EXACT, Tier.DRAM, 32, True
    is_provisional = False

    def __init__(self, still_coming: set[int]) -> None:
        self.wanted = SimpleNamespace(layers=(0, 1, 2), hidden_layers=(), byte_count=lambda count: count)
        copied: Future[None] = Future()
        copied.set_result(None)
        self.layers = [[copied]] * 3
        self.coming = still_coming
        self.checks = 0
        self.good = 32

    def landing(self, *_: object) -> Arriving:
        return self

    def has_landed(self, position: int) -> bool:
        return position not in self.coming

    def advance(self) -> bool:
        """A chunk is lost, and so nothing is still to come."""
        self.coming, self.good = set(), 16
        return False

    def settle(self, bad: set[int]) -> int:
        self.checks += 1
        return self.good

    def stop(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def streamed(prefix: Arriving, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, object]]:
    target = SimpleNamespace(layer=lambda position, count: position)
    context = SimpleNamespace(clock=SystemClock(), copier=None, faults=None, timeout_s=1.0)
    monkeypatch.setattr(stream, "before", lambda *_: None)
    monkeypatch.setattr(stream, "after", lambda *_: None)
    return iter(LayerStream(prefix, target, context))  # type: ignore[arg-type]  # stand-ins have what it uses


def test_layers_that_were_copied_together_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = Arriving(set())
    assert [layer for layer, _ in streamed(prefix, monkeypatch)] == [0, 1, 2]
    assert prefix.checks == 1


def test_a_loss_is_seen_by_a_layer_of_which_more_was_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies so far were checked with the first layer; what did not come is known since."""
    layers = streamed(Arriving({2}), monkeypatch)
    assert [next(layers)[0], next(layers)[0]] == [0, 1]
    with pytest.raises(DataLoss):
        next(layers)


@pytest.mark.parametrize("number", [1, 3])
def test_an_interrupt_between_two_jobs_leaves_none_behind(
    client: Client, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nobody has the landing yet who would stop it, and its jobs write to the caller's memory."""
    tokens, begun = tokens_of(COUNT, 77), []
    client.store(ALIKE, tokens, random_cache(ALIKE, COUNT, 77)).wait(10)
    submit = Copier.submit

    def slow(function: Callable[..., object], *arguments: object) -> object:
        sleep(0.1)
        return function(*arguments)

    def interrupted(self: Copier, function: Callable[..., object], *arguments: object) -> Future[object]:
        if len(begun) == number:
            raise KeyboardInterrupt
        begun.append(submit(self, slow, function, *arguments))
        return begun[-1]

    monkeypatch.setattr(landing, "JOB_BYTES", 1)
    monkeypatch.setattr(Copier, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(client.fetch_layers(ALIKE, tokens)))
    assert len(begun) == number
    assert all(each.done() for each in begun)
