"""Which node has which chunk, for whoever chooses a node. Hints: losing all of them costs good choices and no more."""

from kvstore.directory.directory import LIVE_S, NodeDirectory

__all__ = ["LIVE_S", "NodeDirectory"]
