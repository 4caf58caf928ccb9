"""The catalog: models, namespaces, and the chain walk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import and_
from typing import NamedTuple

import numpy as np

from kvstore.catalog.events import Event
from kvstore.catalog.models import Models, Use
from kvstore.catalog.namespace import Namespace
from kvstore.catalog.spaces import Model, Spaces, parent_digest
from kvstore.catalog.table import ROOT_ROW, ChunkTable, RowIdentity
from kvstore.keys import ROOT_DIGEST
from kvstore.presence import PresenceTable
from kvstore.seams import Memory
from kvstore.spec import ChunkState, Encoding, EventKind, MissReason, ModelSpec, Tier


class ChainRun(NamedTuple):
    """``chunk_count`` consecutive chunks of a chain that have the same state, reason, tier and encoding."""

    chunk_count: int
    state: ChunkState
    reason: MissReason
    tier: Tier
    encoding: Encoding


class TailsFound(NamedTuple):
    """The partial chunks after a parent. ``rows``: the newest ones. ``lengths``: a bitmap of the lengths of all, where
    bit n stands for n tokens; 0: ``rows`` are all."""

    rows: list[int]
    lengths: int


class Walk(NamedTuple):
    """The result of looking a chain up: the number of leading chunks that hit, runs over the whole chain, and the rows
    of the hits per namespace."""

    hit_count: int
    runs: tuple[ChainRun, ...]
    chains: list[list[int]]

    def onwards(self, start: int, chains: Sequence[Sequence[int]]) -> Walk:
        """Return the walk with more hits: the rows ``chains`` of the chunks from index ``start`` on, which shared tiers
        have. Return this walk unchanged where they do not extend its hits."""
        have = [rows[:start] + list(more) for rows, more in zip(self.chains, chains, strict=True)]
        count = min(map(len, have))
        if self.hit_count < start or count <= self.hit_count:
            return self
        return self._replace(hit_count=count, chains=have)

    @property
    def reason(self) -> MissReason:
        """The reason why the chunk after the last hit is missing: COLD while it is being stored; NONE when the whole
        chain hit."""
        last = 0
        for run in self.runs:
            last += run.chunk_count
            if last > self.hit_count:
                return run.reason or MissReason.COLD
        return MissReason.NONE


class Catalog:
    """All models of one tenant, and the table of its chunks."""

    def __init__(self, model_count_max: int, memory: Memory, namespace_count_max: int) -> None:
        self.table = ChunkTable()
        self.presence = PresenceTable(memory)
        self.spaces = Spaces(self.table, self.presence, namespace_count_max)
        self.registered = Models(self.spaces, model_count_max)
        self.models = self.registered.known
        """The registered models by fingerprint, for those who only look: ``model`` counts as a use."""
        self.withdrawn_count = 0
        """Chunks that became invisible. While it stays, all chunks that a walk found are here, in the same rows."""

    def register(self, spec: ModelSpec) -> Model:
        """Register a spec. Idempotent. At limits.model_count_max, the least recently used model that nothing needs is
        forgotten for a new one. Raises InvalidRequest when the same weights are registered with another geometry;
        Exhausted where every model is in use. Cost: a pass over the models."""
        model = self.registered.register(spec)
        for space in self.spaces.of(model.fingerprint):
            if space.model_spec is None:  # found on the device: from now on clients see it
                model.seen(None, space.exactness, space.provenance)
        return model

    def model(self, name: bytes) -> Model:
        """Return the model that a fingerprint names, which counts as a use of it. Raises InvalidRequest, which tells
        the client to register it, when it was never registered here, or is forgotten."""
        return self.registered.find(name)

    def use(self, name: bytes, spaces: Iterable[Namespace] = ()) -> Use:
        """Begin a use of a model, and of some of its namespaces, which are not forgotten until it ends. Raises as
        ``model``."""
        return Use(self.model(name), spaces)

    def walk(self, namespaces: Sequence[Namespace], digests: Sequence[bytes]) -> Walk:
        """Look a chain up. A chunk hits when every namespace holds it, and all chunks before it hit. Cost: a dict
        look-up per chunk and namespace."""
        hits = len(digests)
        chains: list[list[int]] = []
        for namespace in namespaces:
            rows: list[int] = []
            try:
                rows.extend(map(namespace.index.__getitem__, digests[:hits]))
            except KeyError:  # the first missing chunk: ``rows`` has those before it
                hits = len(rows)
            chains.append(rows)
        chains = [rows[:hits] for rows in chains]
        runs = self._hit_runs(chains, hits)
        if hits < len(digests):
            runs += absent_runs(namespaces, digests[hits:])
        return Walk(hits, tuple(runs), chains)

    def _hit_runs(self, chains: Sequence[Sequence[int]], hits: int) -> list[ChainRun]:
        """Return runs of chunks that lie in the same tier. The tier of a chunk is that of its slowest part."""
        if not hits:
            return []
        table = self.table
        if all(map(table.copies[0].have_all, chains)):
            return [ChainRun(hits, ChunkState.HIT, MissReason.NONE, table.copies[0].kind, Encoding.RAW)]
        places = map(max, zip(*map(table.places, chains), strict=True))
        return [
            ChainRun(len(list(alike)), ChunkState.HIT, MissReason.NONE, table.copies[tier].kind, Encoding(encoding))
            for (tier, encoding), alike in groupby(places)
        ]

    def tails(self, namespaces: Sequence[Namespace], parent: bytes) -> TailsFound:
        """Return the partial chunks after ``parent``: rows that every namespace holds, lengths that every one has."""
        first, digests = namespaces[0].tails, self.table.digests
        rows = [row for row in first.named(parent) if all(digests[row] in each.index for each in namespaces)]
        if first.are_all_named(parent):
            return TailsFound(rows, 0)
        return TailsFound(rows, reduce(and_, (each.tails.bits(parent, self.table.token_counts) for each in namespaces)))

    def first_of(self, namespaces: Sequence[Namespace], digests: Sequence[bytes]) -> int:
        """Return the position, from 1 on, of the first of these chunks that every namespace holds, whatever comes
        before it in a chain; 0: none."""
        for number, digest in enumerate(digests, 1):
            if all(digest in each.index for each in namespaces):
                return number
        return 0

    def is_tail_of(self, row: int, parents: Mapping[bytes, int]) -> bool:
        """True when a row is a partial chunk without children, its parent is among ``parents`` (digest -> token count),
        and it has fewer tokens than the count there."""
        count = self.table.token_counts[row]
        is_tail = self.space_of(row).is_tail(count) and not self.table.child_counts[row]
        return is_tail and count < parents.get(parent_digest(self.table, row), 0)

    def below(self, space: Namespace, rows: Iterable[int]) -> list[int]:
        """Return the rows of the descendants of a namespace's chunks, parents before children: those that came in the
        second when these did, or later. Earlier ones hang on chunks that had these names before. Cost: nothing where
        none of the chunks has a child; else a pass over the table, and a sort of what came since."""
        table = self.table
        found = [row for row in rows if table.child_counts[row]]
        count = len(found)
        if not count:
            return []
        since_s = min(table.stored_s[row] for row in found)
        length = len(table.digests)  # columns are longer after a growth that failed
        is_later = np.frombuffer(table.stored_s, np.uint32, length) >= since_s
        ours = np.flatnonzero(is_later & (np.frombuffer(table.spaces, np.uint16, length) == space.number))
        parents = np.frombuffer(table.parents, np.int32)[ours]
        order = np.argsort(parents, kind="stable")
        ours, parents = ours[order], parents[order]
        for row in found:  # it grows meanwhile
            start, stop = np.searchsorted(parents, (row, row + 1))
            found += ours[start:stop].tolist()
        return [row for row in found[count:] if table.digests[row]]

    def worth(self, row: int) -> tuple[int, float]:
        """Return a chunk's weight (``known_bytes``) and its cost, which stands for the time to compute it again: its
        number of tokens."""
        return self.known_bytes(row), float(self.table.token_counts[row])

    def known_bytes(self, row: int) -> int:
        """Return a chunk's bytes as stored raw; 0 while the model is unknown, and where it has no chunks of such a
        length."""
        return self.space_of(row).known_bytes(self.table.token_counts[row])

    def show(self, row: int) -> None:
        """Let clients see that the place of a visible chunk changed."""
        self.spaces.show(self.space_of(row), self.table.digests[row])

    def space_of(self, row: int) -> Namespace:
        return self.spaces.numbered[self.table.spaces[row]]

    def is_visible(self, row: int) -> bool:
        """True when lookups find the row's chunk; False for a ghost."""
        return self.space_of(row).index.get(self.table.digests[row]) == row

    def is_here(self, row: int, identity: RowIdentity) -> bool:
        """True when the row still belongs to the chunk ``identity``, and lookups find it."""
        return self.table.identity(row) == identity and self.is_visible(row)

    def stored(self, batch_count: int) -> Iterator[list[Event]]:
        """Give a STORED event for every visible chunk, in batches. A chunk that changes between two batches is told as
        it was or as it is."""
        table, spaces = self.table, self.spaces
        for space in list(spaces.numbered):
            rows = list(space.index.values())
            for start in range(0, len(rows), batch_count):
                yield [
                    spaces.event(EventKind.STORED, row, table.kind(row))
                    for row in rows[start : start + batch_count]
                    if table.digests[row] and self.is_visible(row) and self.space_of(row) is space
                ]

    def row_of(self, namespace: Namespace, digest: bytes, parent: bytes, token_count: int) -> int:
        """Return the row for a chunk that is about to be published: its ghost's row, or a new one. A parent without a
        row gets one as a ghost."""
        row = namespace.ghosts.get(digest)
        if row is not None:
            if not self.table.token_counts[row] and parent != ROOT_DIGEST:  # a child named it, no store
                self._adopt(namespace, row, parent)
            self.table.token_counts[row] = token_count
            return row
        return self.table.add(namespace.number, digest, self._parent_row(namespace, parent), token_count)

    def known_row(self, namespace: Namespace, digest: bytes, parent: bytes, token_count: int) -> int:
        """Return the row of a chunk that is here or about to be brought. In the latter case the row is a ghost, which
        the caller must hold."""
        row = namespace.index.get(digest)
        if row is None:
            row = namespace.ghosts[digest] = self.row_of(namespace, digest, parent, token_count)
        return row

    def _parent_row(self, namespace: Namespace, parent: bytes) -> int:
        if parent == ROOT_DIGEST:
            return ROOT_ROW
        row = namespace.index.get(parent, namespace.ghosts.get(parent))
        if row is None:
            row = namespace.ghosts[parent] = self.table.add(namespace.number, parent, ROOT_ROW, 0)
        return row

    def _adopt(self, namespace: Namespace, row: int, parent: bytes) -> None:
        """Set the parent of a ghost that only its children had named, as its own store names it."""
        parents, above = self.table.parents, self._parent_row(namespace, parent)
        ancestor = above
        while ancestor not in (ROOT_ROW, row):
            ancestor = parents[ancestor]
        if ancestor == ROOT_ROW:  # else the chain turns back, and each row would keep the other for ever
            parents[row] = above
            self.table.child_counts[above] += 1

    def publish(self, row: int) -> None:
        """Make a chunk that a tier holds visible."""
        table = self.table
        namespace, digest = self.space_of(row), table.digests[row]
        assert digest not in namespace.index
        namespace.ghosts.pop(digest, None)
        namespace.index[digest] = row
        namespace.byte_count += namespace.chunk_bytes(table.token_counts[row])
        self.spaces.departures.remove(namespace, digest)
        self.spaces.tell(EventKind.STORED, row, table.kind(row))
        self.spaces.show(namespace, digest)
        if namespace.is_tail(table.token_counts[row]):
            parent = parent_digest(table, row)
            is_first = namespace.tails.add(parent, row, table.token_counts)
            self.spaces.show_tail(namespace, parent, table.token_counts[row])
            if is_first:
                self.spaces.show(namespace, parent)

    def moved(self, row: int, tier: Tier) -> None:
        """Tell clients and watchers that ``tier`` is now the fastest one that has the chunk."""
        if self.is_visible(row):
            self.show(row)
            self.spaces.tell(EventKind.MOVED, row, tier)

    def claim(self, namespace: Namespace, digest: bytes, store: object) -> None:
        """Mark a chunk as being stored by ``store``, which will publish it unless it is ``unclaim``ed first."""
        namespace.pending[digest] = store
        self.spaces.show(namespace, digest)

    def unclaim(self, namespace: Namespace, digest: bytes) -> None:
        """Take back a claim: the chunk's store ended. A chunk that is not claimed is no error."""
        namespace.pending.pop(digest, None)
        self.spaces.show(namespace, digest)

    def depart(self, namespace: Namespace, digest: bytes, reason: MissReason) -> None:
        """Remember why a chunk is not here."""
        forgotten = self.spaces.departures.add(namespace, digest, reason)
        self.spaces.show(namespace, digest)
        if forgotten is not None:
            self.spaces.show(*forgotten)

    def withdraw(self, row: int, reason: MissReason, tier: Tier) -> None:
        """Make a chunk that no tier holds any more invisible; ``tier`` was the last that had it. While something refers
        to its row, it is a ghost."""
        table = self.table
        assert not table.is_resident(row)
        namespace, digest = self.space_of(row), table.digests[row]
        del namespace.index[digest]
        self.withdrawn_count += 1
        self.spaces.tell(EventKind.REMOVED, row, tier, reason)
        namespace.byte_count -= namespace.chunk_bytes(table.token_counts[row])
        self.depart(namespace, digest, reason)
        if namespace.is_tail(table.token_counts[row]):
            parent = parent_digest(table, row)
            is_last = namespace.tails.remove(parent, row, table.token_counts)
            self.spaces.show_tail(namespace, parent, table.token_counts[row])
            if is_last:
                self.spaces.show(namespace, parent)
        namespace.ghosts[digest] = row
        self.forget_ghost(row)

    def forget_ghost(self, row: int) -> None:
        """Free a ghost's row if nothing refers to it any more, then its parent's if the same holds there, and so on."""
        table = self.table
        while row != ROOT_ROW and not table.is_needed(row) and not table.is_resident(row):
            namespace, digest, parent = self.space_of(row), table.digests[row], table.parents[row]
            if namespace.ghosts.pop(digest, None) is None:
                return
            table.remove(row)
            row = parent

    def unhold(self, row: int) -> None:
        """Undo one ``table.hold``."""
        self.table.unhold(row)
        if not self.table.child_counts[row]:  # of a long chain, only the last one: a lease may have 100,000 rows
            self.forget_ghost(row)


def absent_runs(namespaces: Sequence[Namespace], digests: Sequence[bytes]) -> list[ChainRun]:
    """Return the runs of the chunks after the last hit. They are no hits even where they are stored, because a chunk
    before them is missing. Cost: 0.1 us a chunk and namespace where all of them are cold, else 1 us."""
    if digests and all(
        each.pending.keys().isdisjoint(digests) and each.departures.keys().isdisjoint(digests) for each in namespaces
    ):
        return [ChainRun(len(digests), ChunkState.MISS, MissReason.COLD, Tier.NONE, Encoding.NONE)]
    runs: list[ChainRun] = []
    for (state, reason), alike in groupby(_absent(namespaces, digest) for digest in digests):
        runs.append(ChainRun(sum(1 for _ in alike), state, reason, Tier.NONE, Encoding.NONE))
    return runs


def joined_runs(runs: Iterable[ChainRun]) -> list[ChainRun]:
    """Join neighbouring runs that differ in nothing but their counts."""
    joined: list[ChainRun] = []
    for run in runs:
        if joined and joined[-1][1:] == run[1:]:
            joined[-1] = run._replace(chunk_count=joined[-1].chunk_count + run.chunk_count)
        else:
            joined.append(run)
    return joined


def _absent(namespaces: Sequence[Namespace], digest: bytes) -> tuple[ChunkState, MissReason]:
    reason = MissReason.NONE
    for namespace in namespaces:
        if digest in namespace.pending:
            return ChunkState.PENDING, MissReason.NONE
        if digest not in namespace.index:
            reason = max(reason, namespace.departures.get(digest, MissReason.COLD))
    return ChunkState.MISS, reason or MissReason.COLD
