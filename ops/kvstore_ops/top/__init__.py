"""``kvstore top``: a live view of the sidecar.

- ``sample``  one sample of the statistics, and rates between two samples
- ``others``  the other tenants' statistics
- ``frame``   samples as lines of any width
- ``screen``  lines on a terminal, until the user quits
"""
