"""Segments: the documents of a prompt, whose caches were computed alone and may be reused at any place.

``runs`` checks a caller's segments and reports what is stored of them. ``known`` is the table that finds documents
again inside uncut text. A segment is named by all its tokens: a match of a hash of its beginning counts only when the
digest of all its tokens confirms it.
"""

from kvstore_client.segments.known import KnownSegments

__all__ = ["KnownSegments"]
