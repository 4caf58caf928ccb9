"""The operator's commands: what the sidecar holds, chunk by chunk, and what is to become of it.

- ``calls``     the calls of AdminService, each with a bound on how long it may say nothing
- ``words``     what people write, into what a call takes
- ``harmless``  names that others chose, fit for a terminal
- ``tables``    replies as tables, or as JSON
- ``reading``   the commands that change nothing
- ``changing``  those that do, each with a dry run
"""
