"""Pages of the documentation that are made from the code or from results, so that they stay true.

``python -m kvstore_ops.pages`` writes them; a test fails when one is outdated.
"""

from kvstore_ops.pages.page import MADE, outdated, write

__all__ = ["MADE", "outdated", "write"]
