"""Adapters of engines: ``vllm`` is a room, ``sglang`` a file; ``transformers`` has files beside it, named after it."""
