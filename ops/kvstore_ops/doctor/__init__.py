"""``kvstore doctor``: what is wrong with this machine, the settings and the service, why it matters, and what to do.

- ``finding``  what a look comes to
- ``machine``  the kernel, open files, memory, the clock, certificates
- ``device``   the device tier's directory: its file system, direct I/O, room and rate
- ``engines``  Redis and S3, as they and the running sidecar's tiers tell
- ``round``    a chunk stored, and fetched back through each tier
- ``command``  all of them
"""
