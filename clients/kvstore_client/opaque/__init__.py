"""Opaque values by namespace and key, and what is kept as such: encoder caches.

``value`` says how a value lies in chunks, ``reader`` reads them, ``encoder`` packs embeddings.
"""
