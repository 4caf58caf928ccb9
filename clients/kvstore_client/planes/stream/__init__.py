"""The plane of other hosts: the same calls, with the bytes in the messages instead of shared memory.

- ``session``   the channel, and the stream whose end is the session's end
- ``prefix``    a prefix that arrives in messages: ``strips`` checks their bytes, which are copied from the message gRPC
  gave into tensors, once
- ``store``     tensors into messages: each byte is copied once, into the message gRPC takes

Bytes from a network are always verified, whatever ``verify`` says. A stream of bytes has the client's timeout, and a
second more for every RATE_BYTES_MIN bytes it may bring.
"""
