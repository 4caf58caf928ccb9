"""Stores: the caller's tensors to the sidecar.

``store`` keeps a whole context, from ``tensors`` or from an engine's ``pages``; ``writer`` keeps a context that the
engine writes layer by layer (``gathering`` collects whole strips). ``calls`` are the client's calls of both. Nothing of
a store is visible before its commit; ``receipt`` tells its outcome.
"""
