"""Tenant secrets: the key of the keyed digest that turns a chain digest into a storage key; and the keys that copies
outside memory are sealed with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

DEFAULT_TENANT_SECRET = blake3(b"kvstore default tenant, a published constant\n").digest()
_CONTEXT = "kvstore 2026-11 secret of a tenant"
_ENVELOPE_CONTEXT = "kvstore 2026-11 envelope key"
_FOLLOWING_CONTEXT = "kvstore 2026-11 envelope key of a naming secret"


@dataclass(frozen=True, kw_only=True)
class TenantKeys:
    """One tenant's name and 32-byte secret. The default tenant's secret is a published constant: it
    separates namespaces, it keeps nothing confidential."""

    tenant: str = "default"
    secret: bytes = field(default=DEFAULT_TENANT_SECRET, repr=False)

    @classmethod
    def derived(cls, tenant: str, text: bytes) -> TenantKeys:
        """The keys of a tenant whose secret is a text of any length: the same on every host."""
        return cls(tenant=tenant, secret=blake3(text, derive_key_context=_CONTEXT).digest())

    @property
    def digest(self) -> bytes:
        """A digest of 16 bytes that names the tenant in chunk headers without revealing the secret."""
        return blake3(b"tenant\0" + self.tenant.encode(), key=self.secret).digest(16)


@dataclass(frozen=True, slots=True)
class EnvelopeKey:
    """A key with which copies are sealed, and its 16-byte id in their headers, which reveals nothing of the key."""

    key_id: bytes
    key: bytes = field(repr=False)

    @classmethod
    def derived(cls, text: bytes) -> EnvelopeKey:
        """Return the key of a text of any length: the same on every host."""
        return cls._named(blake3(text, derive_key_context=_ENVELOPE_CONTEXT).digest())

    @classmethod
    def following(cls, keys: TenantKeys) -> EnvelopeKey:
        """Return the key of a tenant that has a naming secret and no envelope key of its own."""
        return cls._named(blake3(keys.secret, derive_key_context=_FOLLOWING_CONTEXT).digest())

    @classmethod
    def _named(cls, key: bytes) -> EnvelopeKey:
        return cls(blake3(b"envelope key id\0", key=key).digest(16), key)


class EnvelopeRing:
    """The envelope keys of a tenant. The first is the newest, and seals; all of them open. They can change while the
    service runs."""

    def __init__(self, keys: Sequence[EnvelopeKey] = ()) -> None:
        self._keys: dict[bytes, EnvelopeKey] = {}
        self.change(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def newest(self) -> EnvelopeKey:
        return next(iter(self._keys.values()))

    @property
    def keys(self) -> dict[bytes, EnvelopeKey]:
        """The keys by their ids."""
        return dict(self._keys)

    @property
    def key_ids(self) -> list[bytes]:
        return list(self._keys)

    def key_of(self, key_id: bytes) -> EnvelopeKey | None:
        return self._keys.get(key_id)

    def change(self, keys: Sequence[EnvelopeKey]) -> None:
        """Replace all keys. ``keys``: the newest first."""
        self._keys = {each.key_id: each for each in keys}
