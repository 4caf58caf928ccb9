"""Adapters of engines: ``vllm`` is a room, ``sglang`` and ``transformers`` have files beside them, named after them.
``patience`` pauses an engine's calls to a stalled sidecar."""
