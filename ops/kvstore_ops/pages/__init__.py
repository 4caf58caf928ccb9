"""Pages of the documentation that are made from the code or from results, so that they cannot become untrue.

``python -m kvstore_ops.pages`` writes them; a test says when one is not current.
"""

from kvstore_ops.pages.page import MADE, outdated, write

__all__ = ["MADE", "outdated", "write"]
