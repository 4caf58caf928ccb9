"""Whatever way a cache is put, whole or in any layers, heads and tokens, by one rank or several, from dense memory or
from pages, it comes back to the bit in any other way."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, Paged
from kvstore_client.store.writer import StoreWriter

from kvstore.spec import DTYPES, LayerKind, LayerSpec, ModelSpec
from tests.specs import UNSIGNED, bits, random_cache, small_spec, tokens_of

SEEDS = range(16)
LAYOUTS = ("kv page slot head dim", "page kv head slot dim", "page head slot dim", "head page slot kv dim")
DIMS = ((8, 8), (64, 64), (128, 128), (40, 24))
NOBODYS = 0xDB


class Case:
    """One cache, and ways to cut it, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.heads, (k_dim, v_dim) = chance.choice((1, 2, 3, 4, 8)), chance.choice(DIMS)
        layers = [LayerSpec(kv_heads=self.heads, k_dim=k_dim, v_dim=v_dim)] * chance.randint(1, 3)
        if len(layers) == 3 and chance.random() < 0.5:
            layers[1] = LayerSpec(kind=LayerKind.NONE)
        dtype = chance.choice(("bfloat16", "float32", "float8_e4m3fn"))
        chunk_tokens = chance.choice((16, 17, 64, 256))
        self.spec: ModelSpec = small_spec(
            model_id=f"cut {seed}", layers=tuple(layers), chunk_tokens=chunk_tokens, cache_dtype=dtype
        )
        self.count = chance.choice((1, 16, 17, 90, 400))
        self.tokens, self.cache = tokens_of(self.count, seed), random_cache(self.spec, self.count, seed)
        self.layers = self.spec.slab_layers

    def bounds(self, start: int, stop: int) -> list[tuple[int, int]]:
        """A run in one to three parts, in any order."""
        inside = [self.chance.randint(start, stop) for _ in range(self.chance.choice((0, 0, 1, 2)))]
        parts = list(pairwise(sorted({start, stop, *inside})))
        self.chance.shuffle(parts)
        return parts

    def pages(self, heads: int, count: int) -> tuple[Any, Any, Any, str]:
        """Pages of one layer nobody has written: what an engine holds, K and V of each slot that is named,
        [tokens, heads, dim], to be read or written by an index, the slots, and the layout."""
        layer, size = self.spec.layers[self.layers[0]], self.chance.choice((1, 3, 16))
        page_count = -(-count // size) + 2
        order = np.random.default_rng(self.chance.randrange(1 << 30)).permutation(page_count)
        slots = order[np.arange(count) // size] * size + np.arange(count) % size
        names = self.chance.choice([each for each in LAYOUTS if layer.k_dim == layer.v_dim or "kv" not in each]).split()
        dim = layer.k_dim if "kv" in names else layer.k_dim + layer.v_dim
        extent = {"kv": 2, "page": page_count, "slot": size, "head": heads, "dim": dim}
        held = np.full([extent[name] for name in names], NOBODYS, UNSIGNED[DTYPES[self.spec.cache_dtype]])
        view = held.transpose([names.index(name) for name in ("kv", "page", "slot", "head", "dim") if name in names])
        planes = (view[0], view[1]) if "kv" in names else (view[..., : layer.k_dim], view[..., layer.k_dim :])
        return held, planes, slots, " ".join(names)

    def put(self, writer: StoreWriter, heads: range) -> None:
        """All of some heads, in pieces; heads that come together do so for every token."""
        cuts = self.bounds(heads.start, heads.stop)
        for start, stop in self.bounds(0, self.count):
            for first, last in cuts:
                for layer in self.layers:
                    piece = [plane[first:last, start:stop] for plane in self.cache[layer]]
                    given: Any = piece
                    if self.chance.random() < 0.5:
                        held, planes, slots, layout = self.pages(last - first, stop - start)
                        for plane, said in zip(planes, piece, strict=True):
                            size = plane.shape[1]
                            plane[slots // size, slots % size] = said.transpose(1, 0, 2)
                        given = Paged([held], slots, layout)
                    writer.put_layer(layer, given, heads=(first, last), token_start=start)

    def keep(self, client: Client) -> None:
        ranks = self.chance.choice([each for each in (0, 1, 2, 3, 4, 8) if not each or self.heads % each == 0])
        if not ranks:
            assert client.store(self.spec, self.tokens, self.cache).stored_token_count == self.count
            return
        first = client.start_store(self.spec, self.tokens, shards=ranks)
        writers = [first, *(client.join_store(first.ticket, shard) for shard in range(1, ranks))]
        share = self.heads // ranks
        for rank, writer in enumerate(writers):
            self.put(writer, range(rank * share, (rank + 1) * share))
        receipts = [writer.commit() for writer in writers]
        assert [each.stored_token_count for each in receipts] == [self.count] * ranks

    def check(self, client: Client) -> None:
        """Some layer's heads, from memory of the client's own or in pages; by tokens or by ticket."""
        layer, verify = self.chance.choice(self.layers), self.chance.random() < 0.5
        first, last = sorted(self.chance.sample(range(self.heads + 1), 2))
        held, planes, slots, layout = self.pages(last - first, self.count)
        into = Paged([held], slots, layout) if self.chance.random() < 0.5 else None
        how: dict[str, Any] = {"layers": [layer], "heads": (first, last), "into": into, "verify": verify}
        if self.chance.random() < 0.5:
            found = client.fetch(self.spec, self.tokens, **how)
            assert found.token_count == self.count
            got = found[0]
        else:
            transfer = client.start_fetch(client.lookup(self.spec, self.tokens, hold=True).ticket or b"", **how)
            transfer.wait(10.0)
            got = transfer.wait_layer(layer)
        for which, said in enumerate(self.cache[layer]):
            if into is None:
                assert np.array_equal(bits(got[which]), said[first:last])
                continue
            rows = planes[which].reshape(-1, *planes[which].shape[2:])
            assert np.array_equal(rows[slots].transpose(1, 0, 2), said[first:last])
            assert (np.delete(rows, slots, axis=0) == NOBODYS).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_comes_back_whichever_way_it_was_cut(client: Client, seed: int) -> None:
    case = Case(seed)
    case.keep(client)
    for _ in range(4):
        case.check(client)
