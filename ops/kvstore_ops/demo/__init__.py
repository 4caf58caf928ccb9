"""The demo: a real decoder model behind a real sidecar answers one long prompt four times: cold; warm; after engine and
sidecar were both restarted, when only the device still has the cache; and on another node, which gets it from Redis.

Each scene is an engine process of its own: it builds the model from its seed, connects, and answers. A later scene
shares data with the first only through the sidecar. ``scene`` is the engine process, ``stage`` runs the scenes,
``nodes`` sets up the other node, ``progress`` shows the steps, ``show`` draws the table and the picture, ``text`` and
``model`` make the inputs.
Afterwards ``real`` asks a pretrained model about real documents, if one is installed, and ``reuse`` asks the trained
models.
"""

from kvstore_ops.demo.stage import main

__all__ = ["main"]
