"""Lookups: what is stored of a prompt, and where. They move no bytes.

- ``match``     what a lookup says
- ``presence``  the sidecar's table in shared memory: lookups without a call
- ``tails``     partial chunks: the longest that a prompt begins with
- ``locate``    nodes and tiers, for routers
- ``watch``     what becomes visible, goes and moves; ``feed`` is its stream
"""
