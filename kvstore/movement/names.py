"""What a read of a chunk must find: its storage key, its layout, and which write of it."""

from __future__ import annotations

from kvstore.catalog import Catalog, Namespace
from kvstore.keys import storage_key
from kvstore.seams import TenantKeys
from kvstore.tiers import ChunkName


class ChunkNames:
    """The names under which one tenant's chunks lie in tiers."""

    def __init__(self, catalog: Catalog, keys: TenantKeys) -> None:
        self._catalog = catalog
        self._keys = keys

    def key(self, space: Namespace, digest: bytes) -> bytes:
        """The storage key of a chunk."""
        return storage_key(self._keys.secret, space.fingerprint, space.provenance, space.exactness, digest)

    def of(self, row: int) -> ChunkName:
        """The key, the layout, and the write that the catalog knows."""
        table, space = self._catalog.table, self._catalog.space_of(row)
        return ChunkName(
            self.key(space, table.digests[row]), space.layout(table.token_counts[row]), table.write_marks[row]
        )
