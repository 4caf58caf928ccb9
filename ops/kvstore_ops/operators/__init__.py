"""The operator's commands: they show the sidecar's chunks, and change them.

- ``calls``     the calls of AdminService, each with a limit on the wait for a message
- ``words``     options of the command line, turned into requests
- ``harmless``  names from others, made safe for a terminal
- ``tables``    replies as tables, or as JSON
- ``reading``   the commands that change nothing
- ``changing``  the commands that change something, each with a dry run
- ``chains``    prompts, or digests of last chunks, turned into chains of chunks
- ``draining``  ``kvstore drain --service``, one tenant after the other
- ``warming``   ``kvstore warm``
"""
