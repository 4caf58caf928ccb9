"""Segments: the documents of a prompt, whose caches were computed alone and may stand anywhere.

``runs`` has what a caller says and hears of a prompt's segments, ``known`` the table by
which documents are found again inside text nobody cut. A segment is named by all its tokens; one found by a hash of its
beginning is taken for it only when the digest of all its tokens says so.
"""

from kvstore_client.segments.known import KnownSegments
from kvstore_client.segments.runs import SegmentMatch

__all__ = ["KnownSegments", "SegmentMatch"]
