"""Classifies an object for a reader or a writer of one chunk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvstore.chunk import ChunkHeader, Trust
from kvstore.errors import DataLoss
from kvstore.tiers.contract import ChunkName, check_header
from kvstore.tiers.s3.looking import Looked


class Finding(Enum):
    """The kind of an object. ABSENT: there is none. HIDDEN: denied, and perhaps not there. OURS: any write of the
    chunk. NEWER: written by a newer release, or in an envelope whose key this node lacks: it neither reads nor replaces
    that. ARCHIVED: in a storage class that gives no bytes, so nobody can tell what it is: it is not replaced either.
    DAMAGED: not the chunk, or not whole: it may be replaced."""

    ABSENT = "absent"
    HIDDEN = "hidden"
    OURS = "ours"
    NEWER = "newer"
    ARCHIVED = "archived"
    DAMAGED = "damaged"


KEPT = {
    Finding.NEWER: "an object is a newer release's, or sealed with a key that is not in this node's envelope key file",
    Finding.ARCHIVED: "an object was moved to an archive, which gives no bytes before they are restored: see the rules "
    "that kvstore doctor names, and Intelligent-Tiering",
}
"""The log says so of objects that are misses here, and stay."""
REFUSED = {
    Finding.NEWER: "tiers.s3: a newer release, or a node with another envelope key, has stored this chunk: update this "
    "node, or its key file",
    Finding.ARCHIVED: "tiers.s3: this chunk's object was moved to an archive: end the bucket's rule that does so "
    "(kvstore doctor), and restore or remove what it moved",
}
"""A write is refused so where such an object lies."""


@dataclass(frozen=True)
class Judgement:
    """``header`` is set for OURS, ``etag`` for an object that is there, ``reason`` for DAMAGED. ``is_ahead``: the bytes
    that were read ahead are the chunk's leading slabs as they are stored, and not checked yet."""

    finding: Finding
    etag: str = ""
    header: ChunkHeader | None = None
    reason: DataLoss | None = None
    is_ahead: bool = False


def judge(looked: Looked | None, name: ChunkName, trust: Trust) -> Judgement:
    """Classify an object by its header and its length. Any write of the chunk will do. Strips are not checked."""
    if looked is None:
        return Judgement(Finding.ABSENT)
    if looked.is_archived:
        return Judgement(Finding.ARCHIVED)
    try:
        header = trust.read_header(np.frombuffer(bytearray(looked.data), np.uint8), name.layout)
        if header is None:
            return Judgement(Finding.NEWER, looked.etag)
        check_header(ChunkName(name.storage_key, name.layout), header)
        body_bytes = name.layout.body_bytes if header.stored is None else header.stored.body_bytes
        if looked.total_bytes != header.bytes_before(name.layout) + body_bytes:
            raise DataLoss("the object is not as long as the chunk", reason="truncated")
    except DataLoss as error:
        return Judgement(Finding.DAMAGED, looked.etag, reason=error)
    is_body = header.stored is None and header.bytes_before(name.layout) == len(looked.data)
    return Judgement(Finding.OURS, looked.etag, header, is_ahead=looked.is_ahead and is_body)
