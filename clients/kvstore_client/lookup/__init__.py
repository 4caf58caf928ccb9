"""Lookups: find what is stored of a prompt, and where. They move no bytes.

- ``match``     the result of a lookup
- ``presence``  the sidecar's table in shared memory: lookups without a call
- ``tails``     partial chunks: the longest that a prompt begins with
- ``locate``    nodes and tiers, for routers
- ``watch``     events of chunks that become visible, go and move; ``feed`` is their stream
"""
