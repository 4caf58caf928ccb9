"""Opaque values by namespace and key, and encoder caches, which are kept as such values.

``value`` lays a value out in chunks, ``reader`` reads them, ``encoder`` packs embeddings.
"""
