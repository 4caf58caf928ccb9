"""Fetches: stored chunks into owned memory, or the caller's.

``wanted`` says what of a prefix, ``target`` and ``paged`` where it goes, ``stream`` brings it, ``transfer`` does so
beside the caller. A chunk's bytes count only when its plane says afterwards that they were the chunk's.
"""
