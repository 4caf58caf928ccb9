"""``kvstore top``: what the sidecar does, live.

- ``sample``  what one look brings, and rates between two
- ``frame``   samples as lines of any width
- ``screen``  lines on a terminal, until somebody quits
"""
