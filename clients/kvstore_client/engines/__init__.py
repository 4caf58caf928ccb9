"""Adapters of engines: ``vllm`` is a room, ``sglang`` and ``transformers`` have files beside them, named after them.
``pause`` keeps an engine from calling a stalled sidecar on and on."""
