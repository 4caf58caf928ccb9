"""Stores: the caller's tensors to the sidecar.

``store`` keeps a whole context, ``writer`` one that is written as the engine goes, layer by layer (``gathering`` waits
until whole strips are there). Nothing of a store can be seen before its commit; ``receipt`` tells what became of it.
"""
