"""A sidecar through every door, and the dict that it is compared with."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from kvstore_client import Client, Paged, connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.errors import DataLoss
from kvstore.spec import DTYPES, Durability
from tests.e2e.kept import Drawn, Kept
from tests.specs import UNSIGNED, bits

WAIT_S = 60.0
RESTART_EACH = 8
"""Steps."""


class World:
    """A sidecar, clients by both planes, and the dict."""

    def __init__(self, seed: int, sidecar: Sidecar, *, is_roomy: bool) -> None:
        self.drawn = Drawn(seed)
        self.chance, self.numbers = self.drawn.chance, self.drawn.numbers
        self.sidecar = sidecar
        self.is_roomy = is_roomy
        self.seed = seed
        self.prompts: list[Kept] = []
        self.values: dict[tuple[str, str], Any] = {}
        self.embeddings: dict[tuple[int, str], Any] = {}
        self.clients: list[Client] = []
        self.compared = self.read_count = self.hit_count = self.damaged = 0
        self._connect()

    def _connect(self) -> None:
        self.clients = [
            connect(self.sidecar.socket_address), connect(self.sidecar.tcp_address, token=TOKEN),
        ]  # fmt: skip

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def restart(self) -> None:
        """Everything is on the device by now; where misses are allowed some of it is damaged there meanwhile."""
        self.close()
        self.sidecar.stop(kill=self.chance.random() < 0.5)
        if not self.is_roomy:
            self._damage()
        self.sidecar.start()
        self._connect()

    def _damage(self) -> None:
        """Bits of the device's files flip."""
        for path in sorted(self.sidecar.directory.rglob("region-*.kvs")):
            with path.open("r+b") as file:
                place = self.chance.randrange(path.stat().st_size)
                file.seek(place)
                was = file.read(1)[0]
                file.seek(place)
                file.write(bytes([was ^ 1 << self.chance.randrange(8)]))
                self.damaged += 1

    @property
    def client(self) -> Client:
        return self.chance.choice(self.clients)

    # ------------------------------------------------------------ stores

    def store(self, kept: Kept) -> None:
        ways = [self._at_once]
        if not kept.is_segment:
            ways += [self._by_layers]
            if not kept.spec.keeps_e:
                ways += [self._by_pages]
            if kept.head_count > 1 and not kept.hidden:
                ways += [self._by_heads]
        for receipt in self.chance.choice(ways)(kept):
            level = receipt.wait(WAIT_S)
            assert level is Durability.LOCAL or not self.is_roomy, receipt.reason
        self.prompts.append(kept)

    def _at_once(self, kept: Kept) -> list[Any]:
        store = self.client.store_segment if kept.is_segment else self.client.store
        return [store(kept.spec, kept.tokens, kept.given, hidden=kept.hidden or None, extras=kept.extras)]

    def _by_layers(self, kept: Kept) -> list[Any]:
        """In any order, in pieces of any length."""
        how = {"hidden_layers": tuple(kept.hidden), "extras": kept.extras}
        with self.client.start_store(kept.spec, kept.tokens, **how) as writer:
            for layer in self.chance.sample(sorted(kept.planes), len(kept.planes)):
                planes = kept.planes[layer]
                writer.put_layer(layer, planes[0] if kept.spec.keeps_e else planes)
            for layer, rows in kept.hidden.items():
                writer.put_hidden(layer, rows)
            return [writer.commit()]

    def _by_heads(self, kept: Kept) -> list[Any]:
        """Two shards: every layer's first heads, and the rest."""
        cut = self.chance.randint(1, kept.head_count - 1)
        client = self.client
        with client.start_store(kept.spec, kept.tokens, shards=2, extras=kept.extras) as first:
            second = client.join_store(first.ticket, 1)
            for layer, (k, v) in kept.planes.items():
                first.put_layer(layer, (k[:cut], v[:cut]), heads=(0, cut))
                second.put_layer(layer, (k[cut:], v[cut:]), heads=(cut, len(k)))
            receipts = [second.commit(), first.commit()]
            for receipt in receipts:
                receipt.wait(WAIT_S)
            return receipts

    def _by_pages(self, kept: Kept) -> list[Any]:
        how = {"hidden_layers": tuple(kept.hidden), "extras": kept.extras}
        with self.client.start_store(kept.spec, kept.tokens, **how) as writer:
            for layer, planes in kept.planes.items():
                pages, slots = self.pages(planes, kept.count)
                for target, plane in zip(pages, planes, strict=True):
                    target.reshape(-1, *target.shape[2:])[slots] = plane.transpose(1, 0, 2)
                writer.put_layer(layer, Paged([pages], slots, "page slot head dim"))
            for layer, rows in kept.hidden.items():
                writer.put_hidden(layer, rows)
            return [writer.commit()]

    def pages(self, planes: Any, count: int) -> tuple[Any, Any]:
        """Pages of any size, in any order, that hold so many tokens: (K, V), and the tokens' slots."""
        size = self.drawn.size(40)
        page_count = -(-count // size) + 2
        order = self.numbers.permutation(page_count)
        slots = np.array([order[token // size] * size + token % size for token in range(count)])
        made = [np.full((page_count, size, plane.shape[0], plane.shape[2]), 7, plane.dtype) for plane in planes]
        return tuple(made), slots

    # ------------------------------------------------------------ reads

    def read(self, kept: Kept) -> None:
        """All of it or a beginning, some of its heads and layers, into any memory."""
        cut = kept.count if self.chance.random() < 0.5 else self.chance.randint(1, kept.count)
        if any(extra.position >= cut for extra in kept.extras):
            cut = kept.count
        layers = sorted(kept.planes)
        wanted = self.chance.sample(layers, self.chance.randint(1, len(layers)))
        options: dict[str, Any] = {"layers": wanted, "extras": kept.extras, "verify": self.chance.random() < 0.5}
        heads = None
        if kept.head_count > 1 and self.chance.random() < 0.4:
            start = self.chance.randrange(kept.head_count)
            heads = options["heads"] = (start, self.chance.randint(start + 1, kept.head_count))
        ways = [self._fetched, self._layer_by_layer, self._given]
        if not kept.is_segment:
            ways += [self._by_ticket]
            if not kept.spec.keeps_e:
                ways += [self._into_pages]
        way = self.chance.choice(ways)
        found, count = way(kept, kept.tokens[:cut], dict(options))
        self._check_count(kept, cut, count)
        self.read_count += 1
        self.hit_count += count > 0
        for layer, planes in zip(wanted, found, strict=True):
            for ours, theirs in zip(planes, kept.planes[layer], strict=True):
                if kept.spec.keeps_e:
                    expected = theirs[:count]
                else:
                    expected = theirs[slice(*heads) if heads else slice(None), :count]
                    ours = ours[:, :count]
                assert ours.shape == expected.shape, way.__name__
                assert (ours == expected).all(), (way.__name__, kept.spec, cut, options)
                self.compared += 1
        self._read_hidden(kept, cut)

    def _check_count(self, kept: Kept, cut: int, count: int) -> None:
        chunk = kept.spec.chunk_tokens
        assert count <= cut
        if self.is_roomy:
            assert count >= (cut if cut == kept.count else cut // chunk * chunk)

    def _read_hidden(self, kept: Kept, cut: int) -> None:
        if kept.hidden:
            fetch = self.client.fetch_segment if kept.is_segment else self.client.fetch
            layers = tuple(kept.hidden)
            found = fetch(kept.spec, kept.tokens[:cut], layers=(), hidden_layers=layers, extras=kept.extras)
            self._check_count(kept, cut, found.token_count)
            for layer in layers:
                assert (bits(found.hidden[layer]) == kept.hidden[layer][: found.token_count]).all()
                self.compared += 1

    def _bits(self, kept: Kept, found: Any) -> list[tuple[Any, ...]]:
        return [(bits(each),) if kept.spec.keeps_e else tuple(bits(plane) for plane in each) for each in found]

    def _fetched(self, kept: Kept, tokens: Any, options: dict[str, Any]) -> tuple[Any, int]:
        fetch = self.client.fetch_segment if kept.is_segment else self.client.fetch
        found = fetch(kept.spec, tokens, **options)
        return self._bits(kept, found), found.token_count

    def _layer_by_layer(self, kept: Kept, tokens: Any, options: dict[str, Any]) -> tuple[Any, int]:
        client = self.client
        stream = (client.fetch_segment_layers if kept.is_segment else client.fetch_layers)(kept.spec, tokens, **options)
        try:
            found = dict(stream)
        except DataLoss:  # what is damaged shows when it comes from the device
            assert not self.is_roomy
            found, stream.token_count = {}, 0
        assert list(found) == (options["layers"] if stream.token_count else [])
        empty = [tuple(plane[:0] if kept.spec.keeps_e else plane[slice(*options.get("heads", (None,))), :0]
                       for plane in kept.planes[layer]) for layer in options["layers"]]  # fmt: skip
        return (self._bits(kept, found.values()) if found else empty), stream.token_count

    def _memory(self, kept: Kept, count: int, options: dict[str, Any]) -> list[Any]:
        """Planes of a caller's, poisoned: each with memory of its own, or cut from what is longer."""
        made, slack = [], self.chance.choice([0, self.drawn.size(20)])
        for layer in options["layers"]:
            planes = kept.planes[layer]
            if kept.spec.keeps_e:
                made.append(np.full((count + slack, planes[0].shape[1]), 7, planes[0].dtype)[slack:])
            else:
                heads = options.get("heads", (0, len(planes[0])))
                shape = heads[1] - heads[0], slack + count
                made.append(tuple(np.full((*shape, each.shape[2]), 7, each.dtype)[:, slack:] for each in planes))
        return made

    def _lent(self, kept: Kept, memory: list[Any]) -> list[Any]:
        """The same memory as arrays, or as torch's tensors."""
        if self.chance.random() < 0.5:
            return memory
        if kept.spec.keeps_e:
            return [tensor(each, kept.spec.hidden_dtype) for each in memory]
        return [tuple(tensor(plane, kept.spec.cache_dtype) for plane in planes) for planes in memory]

    def _given(self, kept: Kept, tokens: Any, options: dict[str, Any]) -> tuple[Any, int]:
        into = self._memory(kept, int(tokens.size), options)
        fetch = self.client.fetch_segment if kept.is_segment else self.client.fetch
        count = fetch(kept.spec, tokens, into=self._lent(kept, into), **options).token_count
        return [(each[:count],) for each in into] if kept.spec.keeps_e else into, count

    def _by_ticket(self, kept: Kept, tokens: Any, options: dict[str, Any]) -> tuple[Any, int]:
        """Looked up by one client, redeemed by another, of either plane."""
        match = self.client.lookup(kept.spec, tokens, hold=True, extras=options.pop("extras"))
        count = match.prefix_token_count
        into = self._memory(kept, count, options)
        if match.ticket is not None:
            client = self.client
            try:
                client.start_fetch(match.ticket, into=self._lent(kept, into), **options).wait(WAIT_S)
            except DataLoss:
                assert not self.is_roomy
                count = 0
        return [(each[:count],) for each in into] if kept.spec.keeps_e else into, count

    def _into_pages(self, kept: Kept, tokens: Any, options: dict[str, Any]) -> tuple[Any, int]:
        count = int(tokens.size)
        memory = self._memory(kept, count, options)
        layers, slots = [], None
        size = self.drawn.size(40)
        page_count = -(-count // size) + 1
        order = self.numbers.permutation(page_count)
        slots = np.array([order[token // size] * size + token % size for token in range(count)])
        for planes in memory:
            layers.append(tuple(np.full((page_count, size, plane.shape[0], plane.shape[2]), 7, plane.dtype)
                                for plane in planes))  # fmt: skip
        into = Paged(layers, slots, "page slot head dim")
        found = self.client.fetch(kept.spec, tokens, into=into, **options).token_count
        flat = [tuple(plane.reshape(-1, *plane.shape[2:])[slots].transpose(1, 0, 2) for plane in pair)
                for pair in layers]  # fmt: skip
        return flat, found

    # ------------------------------------------------------------ values

    def put_value(self) -> None:
        """Of any length, in the place of what the key had."""
        name = f"space/{self.seed}-{self.chance.randrange(3)}", f"key {self.chance.randrange(6)}"
        data = self.drawn.random((self.drawn.size(9 << 20),), np.uint8)
        level = self.client.put_bytes(*name, data).wait(WAIT_S)
        assert level is Durability.LOCAL or not self.is_roomy
        self.values.pop(name, None)  # where there is no room, a kill may take it
        if level is Durability.LOCAL:
            self.values[name] = data

    def put_embeddings(self) -> None:
        if not self.prompts:
            return
        at = self.chance.randrange(len(self.prompts))
        spec, key = self.prompts[at].spec, f"item {self.chance.randrange(3)}"
        dtype = UNSIGNED[DTYPES[spec.cache_dtype]]
        data = self.drawn.random((self.drawn.size(50), self.drawn.size(200)), dtype)
        level = self.client.put_encoder(spec, key, data, dtype=spec.cache_dtype).wait(WAIT_S)
        assert level is Durability.LOCAL or not self.is_roomy
        self.embeddings = {
            (index, name): value for (index, name), value in self.embeddings.items()
            if (self.prompts[index].spec.model_id, name) != (spec.model_id, key)
        }  # fmt: skip
        if level is Durability.LOCAL:
            self.embeddings[at, key] = data

    def read_values(self) -> None:
        for (space, key), data in self.values.items():
            found = self.client.get_bytes(space, key, verify=self.chance.random() < 0.5)
            assert found is not None or not self.is_roomy
            assert found is None or np.array_equal(found, data), (space, key)
            self.compared += 1
        for (index, key), data in self.embeddings.items():
            found = self.client.get_encoder(self.prompts[index].spec, key)
            assert found is not None or not self.is_roomy
            assert found is None or np.array_equal(bits(found), data), key
            self.compared += 1


def tensor(array: Any, dtype: str) -> Any:
    """The same memory as a tensor."""
    same = array if array.itemsize == 1 else array.view(f"i{array.itemsize}")
    return torch.from_numpy(same).view(getattr(torch, dtype))


def live(seed: int, number: int, *, steps: int, reads: int) -> World:
    """The life of one world: stores, reads, values, restarts; at the end everything is read. ``number`` says which of
    four kinds of device it has: encoded or not, roomy or not."""
    environment = {**os.environ, "KVSTORE__TIERS__NVME__ENCODING": ("raw", "lz4")[number % 2]}
    is_roomy = number % 4 < 2
    capacity, nvme = ("128 MiB", "256 MiB") if is_roomy else ("12 MiB", "48 MiB")
    with Sidecar("--capacity", capacity, nvme=nvme, environment=environment, plane="remote") as sidecar:
        world = World(seed, sidecar, is_roomy=is_roomy)
        try:
            for step in range(steps):
                world.store(world.drawn.make(step, world.prompts))
                for kept in [world.prompts[-1], *world.chance.choices(world.prompts, k=reads - 1)]:
                    world.read(kept)
                if step % 4 == 1:
                    world.put_value()
                if step % 4 == 3:
                    world.put_embeddings()
                if step % RESTART_EACH == RESTART_EACH - 1:
                    world.restart()
                    world.read_values()
            for kept in world.prompts:
                world.read(kept)
            world.read_values()
        finally:
            world.close()
    return world
