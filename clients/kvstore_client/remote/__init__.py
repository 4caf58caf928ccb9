"""The remote plane, from the client's side: the same calls, with the bytes in the messages instead of shared memory.

- ``place``     what an address, a token and TLS mean: which plane
- ``session``   the channel, and the stream whose end is the session's
- ``fetching``  messages into tensors: each strip is hashed and then copied from the message gRPC gave, once
- ``storing``   tensors into messages: each byte is copied once, into the message gRPC takes

What comes over a network is always verified, whatever ``verify`` says. A stream of bytes has the client's timeout, and
a second more for every RATE_BYTES_MIN bytes it may bring.
"""
