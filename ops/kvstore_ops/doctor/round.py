"""A check by a chunk that is stored, fetched back through each tier and compared byte for byte. It is removed from the
node, and from shared tiers, at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
from kvstore_client import Client, Durability, ModelSpec
from kvstore_client.prompt import Prompt

from kvstore.errors import KVStoreError
from kvstore.spec import Exactness, Tier
from kvstore.v1alpha import admin_pb2
from kvstore_ops.doctor.finding import Finding, Health
from kvstore_ops.operators.calls import Operator

CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 1 << 20, 64 << 20
"""The service learns its tiers' rates from what is read: by a chunk of some KiB a tier whose first byte takes 20 ms
would look as if it moved 3 MB/s, until an engine reads from it."""
TOKEN_BYTES = 1024
"""Of the doctor's model: 2 layers, K and V, 2 heads of 64 numbers of 2 bytes."""
SETTLE_S_MAX, HELD_S_MAX = 15.0, 5.0
_WHY = "engines compute what they could have fetched"
_REMEDY = "see the service's log, kvstore tiers, and kvstore verify"


class Round:
    """One chunk of random tokens and bytes, of ``byte_count_min`` bytes at least. ``remove``: removes its copy from a
    shared tier, given the tier's name and the storage key; returns why it could not."""

    def __init__(
        self, client: Client, byte_count_min: int = 0, remove: Callable[[str, bytes], str] = lambda *_: ""
    ) -> None:
        byte_count = min(max(byte_count_min, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
        tokens = 1 << (-(-byte_count // TOKEN_BYTES) - 1).bit_length()
        self._spec = ModelSpec.dense(
            "kvstore-doctor", "unverified:kvstore-doctor", layer_count=2, kv_heads=2, head_dim=64, hidden_size=128,
            vocab_size=1 << 16, cache_dtype="float16", chunk_tokens=tokens,
        )  # fmt: skip
        self._remove = remove
        self._client = client
        self._operator = Operator(client)
        self._tokens = np.frombuffer(os.urandom(2 * tokens), np.uint16).astype(np.int64)
        shape = (2, tokens, 64)
        self._cache = [
            tuple(np.random.default_rng().random(shape, np.float32).astype(np.float16) for _ in range(2))
            for _ in range(2)
        ]
        chain = b"".join(Prompt.of(self._spec, self._tokens, (), Exactness.EXACT).digests)
        self._selection = admin_pb2.Selection(chain=chain)

    def looks(self, *, with_shared: bool) -> Iterator[Finding]:
        """Send the chunk through memory, then each slower tier; through shared tiers only ``with_shared``."""
        try:
            reached = self._client.store(self._spec, self._tokens, self._cache).wait(SETTLE_S_MAX)
        except KVStoreError as error:
            yield Finding("store", Health.BAD, error.message, "nothing is kept", _REMEDY)
            return
        if reached is Durability.NONE:
            yield Finding("store", Health.BAD, "the chunk was not kept", "nothing is kept", _REMEDY)
            return
        yield Finding("store", Health.GOOD, f"a chunk reached {reached.name}")
        key, sent, noted = b"", list[str](), set[str]()
        try:
            yield self._fetched("dram")
            reports = self._operator.tiers().tiers
            key = self._storage_key()
            sent = [
                each.stats.name for each in reports
                if each.stats.is_shared and (with_shared or each.write_policy != "never")
            ]  # fmt: skip
            noted = set(sent)
            for tier in [each.stats for each in reports[1:]]:
                if not tier.is_shared:
                    yield from self._through_local(tier.name)
                elif with_shared:
                    yield from self._through_shared(tier.name, key)
                else:
                    said = "say --shared to send a chunk there, and have it removed again"
                    yield Finding(f"round through {tier.name}", Health.UNSEEN, said)
            noted = self._noted()
        except KVStoreError as error:
            yield Finding("round", Health.BAD, error.message, _WHY, _REMEDY)
        finally:
            self._change(evict=admin_pb2.Evict())  # from now on the service writes it nowhere
        for name in sent if key else ():
            yield from self._removed(name, key, is_noted=name in noted)

    def _through_local(self, name: str) -> Iterator[Finding]:
        if not self._moved(name):
            said = "the chunk did not get there in time"
            yield Finding(f"round through {name}", Health.BAD, said, "nothing survives a restart", _REMEDY)
            return
        yield self._fetched(name)

    def _through_shared(self, name: str, key: bytes) -> Iterator[Finding]:
        what = f"round through {name}"
        try:
            last = self._change(move=admin_pb2.Move(tier=name))
        except KVStoreError as error:
            yield Finding(what, Health.BAD, error.message, "other nodes find nothing of this one's there", _REMEDY)
            return
        words = {each.what for each in last.outcomes}
        if "not taken there" in words:
            yield Finding(what, Health.UNSEEN, "it takes no chunks of this size (its chunk_bytes_min)")
        elif "given up by faster tiers" in words:
            yield self._fetched(name)
        else:
            said = last.problem or "the chunk did not get there"
            yield Finding(what, Health.BAD, said, "other nodes find nothing of this one's there", _REMEDY)
        if key:
            self._remove(name, key)  # else the round through a slower tier would find it here

    def _removed(self, name: str, key: bytes, *, is_noted: bool) -> Iterator[Finding]:
        """Remove what the round sent to a shared tier, or the service by the tier's ``write`` setting. ``is_noted``:
        the service had noted a copy there."""
        if (problem := self._remove(name, key)) and self._may_be_in(name, is_noted=is_noted):
            yield Finding(
                f"round through {name}", Health.WEAK, f"the doctor's chunk may stay there: {problem}",
                "it takes room until it is dropped",
                f"remove {key.hex()} there by hand, or run the doctor with the service's --config and credentials",
            )  # fmt: skip

    def _may_be_in(self, name: str, *, is_noted: bool) -> bool:
        """Ask the shared tier for the chunk. Where it, or the service, does not answer, what was noted counts."""
        try:
            found, kind = self._client.locate(self._spec, self._tokens), Tier[name.upper()]
        except KVStoreError:
            return is_noted
        if not found.asked or kind in found.unknown:
            return is_noted
        return any(each.tier is kind and not each.node for each in found.prefixes)

    def _noted(self) -> set[str]:
        """Return the tiers of which the service noted that they have the chunk."""
        parts = self._operator.show(self._selection.chain.hex()).parts
        return {copy.tier for part in parts for copy in part.chunk.copies}

    def _storage_key(self) -> bytes:
        """Return the chunk's name in shared tiers; empty where the sidecar does not say it."""
        parts = self._operator.show(self._selection.chain.hex()).parts
        return bytes(parts[0].header.storage_key) if parts else b""

    def _moved(self, name: str) -> bool:
        last = self._change(move=admin_pb2.Move(tier=name))
        return any(each.what == "given up by faster tiers" for each in last.outcomes)

    def _change(self, **change: object) -> admin_pb2.ChangeResponse:
        """Make a change, and repeat it while the chunk is held: a fetch returns its lease in the background."""
        request = admin_pb2.ChangeRequest(selection=self._selection, **change)  # type: ignore[arg-type]  # one of its fields
        until_s = time.monotonic() + HELD_S_MAX
        while True:
            *_, last = self._operator.change(request)
            if "held" not in {each.what for each in last.outcomes} or time.monotonic() > until_s:
                return last
            time.sleep(0.02)

    def _fetched(self, name: str) -> Finding:
        """Check that the chunk comes back whole from its present tier."""
        began_s = time.perf_counter()
        found = self._client.fetch(self._spec, self._tokens, verify=True)
        took_ms = (time.perf_counter() - began_s) * 1e3
        what = f"round through {name}"
        if found.token_count < self._spec.chunk_tokens:
            return Finding(what, Health.BAD, f"a miss: {found.reason.name}", _WHY, _REMEDY)
        pairs = [(got, put) for layer, stored in zip(found, self._cache, strict=True)
                 for got, put in zip(layer, stored, strict=True)]  # fmt: skip
        if not all(np.array_equal(np.asarray(got).view(np.uint16), put.view(np.uint16)) for got, put in pairs):
            said = "other bytes came back than were stored"
            return Finding(what, Health.BAD, said, "answers would be wrong", "stop the service, and report this")
        return Finding(what, Health.GOOD, f"every byte came back, in {took_ms:.1f} ms")
