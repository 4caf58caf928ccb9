"""Fetches: stored chunks into owned memory, or the caller's.

``wanted`` selects layers and heads of a prefix, ``target`` and ``paged`` are destinations, ``stream`` brings the bytes,
``transfer`` does so beside the caller. ``ticket`` is what travels to another process, ``held`` opens what it holds.
Bytes count only when their plane confirms, after the copy, that they were the chunk's.
"""
