"""The demo: a real decoder model behind a real sidecar, asked the same long prompt four times: cold, warm, after engine
and sidecar were both restarted, when only the device still has it, and on another node, which gets it from Redis.

Each scene is an engine process of its own: it builds the model from its seed, connects, and answers. What a later
scene knows of the first came through the sidecar. ``scene`` is what an engine does, ``stage`` runs the scenes,
``nodes`` has what the last of them needs, ``show`` draws the table and the picture, ``text`` and ``model`` make the
inputs. Behind them ``real`` asks a pretrained model about real documents, where there is one, and ``reuse`` the trained
ones.
"""

from kvstore_ops.demo.stage import main

__all__ = ["main"]
