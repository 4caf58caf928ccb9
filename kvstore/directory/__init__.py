"""Tells which nodes have which chunk, for a router that chooses a node. All of it is hints: losing them costs good
choices and no more."""

from kvstore.directory.directory import KEEP_S, LIVE_S, NodeDirectory

__all__ = ["KEEP_S", "LIVE_S", "NodeDirectory"]
