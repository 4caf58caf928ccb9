"""The catalog: models, namespaces, and the chain walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvstore.catalog.record import Namespace, Record
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import ROOT_DIGEST, fingerprint
from kvstore.spec import CacheKind, ChunkState, Exactness, MissReason, ModelSpec, Provenance

TAIL_COUNT_MAX = 2
Run = tuple[int, ChunkState, MissReason]
"""(count, state, reason) of consecutive chunks that are alike."""


@dataclass(eq=False)
class Model:
    """A registered spec and its namespaces, made when first used."""

    spec: ModelSpec
    fingerprint: bytes
    namespaces: dict[tuple[int | None, Provenance, Exactness], Namespace] = field(default_factory=dict)

    def namespace(
        self, layer: int | None, exactness: Exactness, provenance: Provenance = Provenance.IN_CONTEXT
    ) -> Namespace:
        """The namespace of the attention cache (``layer`` None) or of the E entering ``layer``."""
        key = (layer, provenance, exactness)
        found = self.namespaces.get(key)
        if found is None:
            if layer is not None and not 0 <= layer < self.spec.layer_count:
                raise InvalidRequest(f"hidden layer {layer}: the model has layers 0..{self.spec.layer_count - 1}")
            kind = self.spec.kind if layer is None else CacheKind.E
            name = fingerprint(self.spec, kind, layer)
            found = self.namespaces[key] = Namespace(name, self.spec, kind, layer, provenance, exactness)
        return found


@dataclass(frozen=True, slots=True)
class Walk:
    """What a chain met: how many leading chunks hit, and runs over the whole chain."""

    hit_count: int
    runs: tuple[Run, ...]

    @property
    def reason(self) -> MissReason:
        """Why the chunk after the last hit is missing; NONE when the whole chain hit."""
        for _, state, reason in self.runs:
            if state is not ChunkState.HIT:
                return reason
        return MissReason.NONE


class Catalog:
    """All models of one tenant."""

    def __init__(self, model_count_max: int) -> None:
        self._model_count_max = model_count_max
        self.models: dict[bytes, Model] = {}
        self._geometries: dict[tuple[str, str, str], ModelSpec] = {}

    def register(self, spec: ModelSpec) -> Model:
        """Make a spec known. Idempotent. Raises: InvalidRequest when the same weights were registered with another
        geometry; Exhausted past limits.model_count_max."""
        name = fingerprint(spec, spec.kind)
        known = self.models.get(name)
        if known is not None:
            return known
        _check_agreement(self._geometries.get((spec.model_id, spec.weights_digest, spec.adapter_id)), spec)
        if len(self.models) >= self._model_count_max:
            raise Exhausted(f"{len(self.models)} models are registered: raise limits.model_count_max")
        self._geometries.setdefault((spec.model_id, spec.weights_digest, spec.adapter_id), spec)
        model = self.models[name] = Model(spec, name)
        return model

    def model(self, name: bytes) -> Model:
        """The model a fingerprint names. Raises InvalidRequest when it was not registered here."""
        try:
            return self.models[name]
        except KeyError:
            raise InvalidRequest("this model is not registered with this server: call RegisterModel first") from None

    def walk(self, namespaces: Sequence[Namespace], digests: Sequence[bytes]) -> Walk:
        """A chunk hits when every namespace holds it. Cost: a dict look-up per chunk and namespace."""
        hits = len(digests)
        for namespace in namespaces:
            index = namespace.index
            for position in range(hits):
                if digests[position] not in index:
                    hits = position
                    break
        runs: list[Run] = [(hits, ChunkState.HIT, MissReason.NONE)] if hits else []
        for digest in digests[hits:]:
            state, reason = _absent(namespaces, digest)
            if runs and runs[-1][1] is state and runs[-1][2] is reason:
                runs[-1] = (runs[-1][0] + 1, state, reason)
            else:
                runs.append((1, state, reason))
        return Walk(hits, tuple(runs))

    def tails(self, namespaces: Sequence[Namespace], parent: bytes) -> list[Record]:
        """Partial tails after ``parent`` that every namespace holds."""
        first = namespaces[0].tails.get(parent, ())
        return [record for record in first if all(record.digest in each.index for each in namespaces)]

    def publish(self, record: Record) -> list[Record]:
        """Make a chunk visible. Its parent must be. Returns the partial tails it puts out of use, for removal."""
        namespace = record.namespace
        assert record.digest not in namespace.index
        namespace.index[record.digest] = record
        namespace.departures.pop(record.digest, None)
        if record.parent is not None:
            record.parent.child_count += 1
        parent = record.parent.digest if record.parent else ROOT_DIGEST
        tails = namespace.tails.get(parent, [])
        if record.token_count == namespace.spec.chunk_tokens:
            return list(tails)
        namespace.tails[parent] = [*tails, record]
        return tails[: max(0, len(tails) + 1 - TAIL_COUNT_MAX)]

    def withdraw(self, record: Record, reason: MissReason) -> None:
        """Make a chunk invisible. It must have no children."""
        assert record.child_count == 0
        namespace = record.namespace
        del namespace.index[record.digest]
        namespace.depart(record.digest, reason)
        parent = record.parent.digest if record.parent else ROOT_DIGEST
        if record.parent is not None:
            record.parent.child_count -= 1
        if record.token_count < namespace.spec.chunk_tokens:
            remaining = [tail for tail in namespace.tails[parent] if tail is not record]
            if remaining:
                namespace.tails[parent] = remaining
            else:
                del namespace.tails[parent]


def _absent(namespaces: Sequence[Namespace], digest: bytes) -> tuple[ChunkState, MissReason]:
    reason = MissReason.NONE
    for namespace in namespaces:
        if digest in namespace.pending:
            return ChunkState.PENDING, MissReason.NONE
        if digest not in namespace.index:
            reason = max(reason, namespace.departures.get(digest, MissReason.COLD))
    return ChunkState.MISS, reason or MissReason.COLD


def _check_agreement(known: ModelSpec | None, spec: ModelSpec) -> None:
    """The same weights have one geometry; only how their cache is cut and typed may differ."""
    if known is None:
        return
    free = {name: getattr(spec, name) for name in ("chunk_tokens", "cache_dtype", "hidden_dtype", "scales")}
    if replace(known, **free) == spec:
        return
    fixed = ("layers", "hidden_size", "vocab_size", "rope", "mla")
    wrong = [name for name in fixed if getattr(known, name) != getattr(spec, name)]
    raise InvalidRequest(
        f"model {spec.model_id!r} with these weights is registered with other {', '.join(wrong)}: "
        "the same weights cannot have two geometries",
        fields=wrong,
    )
