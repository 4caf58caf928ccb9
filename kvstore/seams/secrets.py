"""Tenant secrets: the key of the keyed digest that turns a chain digest into a storage key."""

from __future__ import annotations

from dataclasses import dataclass, field

from blake3 import blake3

DEFAULT_TENANT_SECRET = blake3(b"kvstore default tenant, a published constant\n").digest()
_CONTEXT = "kvstore 2026-11 secret of a tenant"


@dataclass(frozen=True, kw_only=True)
class TenantKeys:
    """One tenant's name and 32-byte secret. The default tenant's secret is a published constant: it
    separates namespaces, it keeps nothing confidential. A MAC or AEAD key for stored bytes joins here."""

    tenant: str = "default"
    secret: bytes = field(default=DEFAULT_TENANT_SECRET, repr=False)

    @classmethod
    def derived(cls, tenant: str, text: bytes) -> TenantKeys:
        """The keys of a tenant whose secret is a text of any length: the same on every host."""
        return cls(tenant=tenant, secret=blake3(text, derive_key_context=_CONTEXT).digest())

    @property
    def digest(self) -> bytes:
        """Names the tenant in chunk headers without revealing the secret. 16 bytes."""
        return blake3(b"tenant\0" + self.tenant.encode(), key=self.secret).digest(16)
