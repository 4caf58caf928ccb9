"""The registered models: at the limit, the least recently used one that nothing needs makes room for a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Self

from kvstore.catalog.namespace import Namespace
from kvstore.catalog.spaces import Model, Spaces
from kvstore.errors import Exhausted, InvalidRequest, not_registered
from kvstore.keys import fingerprint
from kvstore.spec import ModelSpec

_Weights = tuple[str, str, str]


class Use:
    """Keeps a model registered, and namespaces their own, until it ends: for what is under way and may have no chunks.

    Whoever begins one ends it in any case: else the model is never forgotten.
    """

    def __init__(self, model: Model, spaces: Iterable[Namespace] = ()) -> None:
        self._users: list[Model | Namespace] = [model, *spaces]
        for each in self._users:
            each.user_count += 1

    def end(self) -> None:
        """Idempotent."""
        for each in self._users:
            each.user_count -= 1
        self._users.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Models:
    """The registered models of one tenant, at most ``count_max``, by fingerprint.

    A model that is forgotten has no chunks on the node, and nothing under way. Its clients are told that it is not
    registered, and register it again.
    """

    def __init__(self, spaces: Spaces, count_max: int) -> None:
        self._spaces = spaces
        self._count_max = count_max
        self._geometries: dict[_Weights, ModelSpec] = {}
        self._use_count = 0
        self.known: dict[bytes, Model] = {}
        self.on_forgotten: list[Callable[[bytes], object]] = []
        """Called with the fingerprint of each model that is forgotten: accounts by model end with it."""

    def register(self, spec: ModelSpec) -> Model:
        """See ``Catalog.register``."""
        name = fingerprint(spec, spec.kind)
        if name in self.known:
            return self.find(name)
        weights = _weights_of(spec)
        _check_agreement(self._geometries.get(weights), spec)
        if len(self.known) >= self._count_max:
            self._make_room()
        self._geometries.setdefault(weights, spec)
        self.known[name] = Model(spec, name, self._spaces)
        return self.find(name)

    def find(self, name: bytes) -> Model:
        """Return a model, and count that as a use of it. Raises InvalidRequest as ``not_registered``."""
        try:
            model = self.known[name]
        except KeyError:
            raise not_registered(name) from None
        self._use_count += 1
        model.used_at = self._use_count
        return model

    def _make_room(self) -> None:
        """Forget one model. Raises Exhausted where every model is in use. Cost: a pass over the models."""
        unneeded = (each for each in self.known.values() if not each.is_needed)
        oldest = min(unneeded, key=lambda each: each.used_at, default=None)
        if oldest is None:
            raise Exhausted(
                f"{len(self.known)} models are registered, and all of them are in use, by stored chunks, or by "
                "stores or tickets under way: raise limits.model_count_max, or evict a model's chunks"
            )
        self._forget(oldest)

    def _forget(self, model: Model) -> None:
        for space in list(model.namespaces.values()):
            self._spaces.forget(space)
        del self.known[model.fingerprint]
        weights = _weights_of(model.spec)
        if all(_weights_of(each.spec) != weights for each in self.known.values()):
            del self._geometries[weights]
        for forgotten in self.on_forgotten:
            forgotten(model.fingerprint)


def _weights_of(spec: ModelSpec) -> _Weights:
    return spec.model_id, spec.weights_digest, spec.adapter_id


def _check_agreement(known: ModelSpec | None, spec: ModelSpec) -> None:
    """Raises InvalidRequest where two specs of the same weights differ in their geometry. They may differ in chunk
    size, data types and tokenizer."""
    if known is None:
        return
    how = ("chunk_tokens", "cache_dtype", "hidden_dtype", "scales", "keeps_e", "tokenizer_digest")
    free = {name: getattr(spec, name) for name in how}
    if replace(known, **free) == spec:
        return
    fixed = ("layers", "hidden_size", "vocab_size", "rope", "mla")
    wrong = [name for name in fixed if getattr(known, name) != getattr(spec, name)]
    raise InvalidRequest(
        f"model {spec.model_id!r} with these weights is registered with other {', '.join(wrong)}: "
        "the same weights cannot have two geometries",
        fields=wrong,
    )
