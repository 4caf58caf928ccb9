"""``kvstore doctor``: the problems of this machine, the settings and the service, with their effects and remedies.

- ``finding``  the result of one check
- ``machine``  the kernel, open files, memory, the clock, certificates
- ``kernel``   huge pages, locked memory, the clock's source, GPUs
- ``device``   the device tier's directory: its file system, direct I/O, room and rate
- ``engines``  Redis and S3, as they and the running sidecar's tiers report
- ``bucket``   the bucket's owner, rights, conditional writes and lifecycle, by requests
- ``round``    a chunk that is stored, and fetched back through each tier
- ``removal``  removes that chunk from shared tiers
- ``command``  all checks
"""
