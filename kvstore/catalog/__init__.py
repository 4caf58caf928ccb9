"""Who holds what. One index per namespace (fingerprint, provenance, exactness), from chain digest to record.

A lookup is a walk: the leading digests that are resident, and of the rest why not. The catalog owns no bytes and
takes no decision; the controller changes it, on the event loop's thread only. A record is published only after
its parent, and withdrawn only after its children, so that a walk never meets a gap.
"""

from kvstore.catalog.catalog import Catalog, Model, Walk
from kvstore.catalog.record import Namespace, Record

__all__ = ["Catalog", "Model", "Namespace", "Record", "Walk"]
