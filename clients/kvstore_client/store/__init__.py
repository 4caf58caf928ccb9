"""Stores: the caller's tensors to the sidecar.

``store`` keeps a whole context, ``writer`` a context that the engine writes layer by layer (``gathering`` collects
whole strips). Nothing of a store is visible before its commit; ``receipt`` tells its outcome.
"""
