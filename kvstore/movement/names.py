"""The names of chunks in tiers: the storage key, the layout and the write that a read of a chunk must find."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.catalog import Catalog, Namespace, parent_digest
from kvstore.chunk import ChunkHeader
from kvstore.keys import storage_key, storage_keys
from kvstore.seams import TenantKeys
from kvstore.tiers import ChunkName


class ChunkNames:
    """The names of one tenant's chunks in tiers."""

    def __init__(self, catalog: Catalog, keys: TenantKeys) -> None:
        self._catalog = catalog
        self._keys = keys

    def key(self, space: Namespace, digest: bytes) -> bytes:
        """Return the storage key of a chunk."""
        return storage_key(self._keys.secret, space.fingerprint, space.provenance, space.exactness, digest)

    def keys(self, space: Namespace, digests: Iterable[bytes]) -> list[bytes]:
        """Return the storage key of each of these chunks."""
        return storage_keys(self._keys.secret, space.fingerprint, space.provenance, space.exactness, digests)

    def of(self, row: int) -> ChunkName:
        """Return the key, the layout, and the write that the catalog knows."""
        table, space = self._catalog.table, self._catalog.space_of(row)
        return ChunkName(
            self.key(space, table.digests[row]), space.layout(table.token_counts[row]), table.write_marks[row]
        )

    def fits(self, row: int, header: ChunkHeader) -> bool:
        """Return True when a header from beyond the node is this chunk's. All of its fields are checked, because they
        are kept with the chunk and believed."""
        table, space = self._catalog.table, self._catalog.space_of(row)
        digest, chain_digest = table.digests[row], header.chain_digest
        return (
            header.storage_key == self.key(space, digest)
            and (chain_digest, header.parent) == (digest, parent_digest(table, row))
            and header.namespace == header.fingerprint == space.fingerprint
            and (header.provenance, header.exactness) == (space.provenance, space.exactness)
            and (header.token_count, header.tenant_digest) == (table.token_counts[row], self._keys.digest)
            and len(header.checksums) == space.layout(header.token_count).strip_count
        )
