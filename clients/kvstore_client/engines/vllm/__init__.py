"""vLLM: prompts that any engine of the node has computed are loaded into the pages instead of computed again.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvstore_client.engines.vllm", "kv_load_failure_policy": "recompute"}'

vLLM loads ``connector``. ``scheduler`` decides which blocks are loaded and kept, with ``planning``, and knows the
``requests``; ``worker`` moves the blocks, and keeps them by ``saves``. ``identity`` names the model, ``geometry`` says
which layers it keeps, ``groups`` which of them share a block table, ``drafts`` those of a model that drafts tokens;
``naming`` and ``hashes`` name its chunks, ``pages`` describes their layout in memory. ``step`` is the scheduler's
message to the workers, ``settings`` are the options, ``versions`` checks vLLM's version, ``objects`` says what of its
objects is used. ``moved`` counts what workers moved, for vLLM's ``metrics``.
Documents at any place in a prompt: ``documents`` reads which a request names, ``reuse`` decides by what mends
were ``worth``, and ``mending`` computes the prompt over them, by vLLM's own layers, which ``runner`` takes apart.
Two smaller entry points: ``tier`` is a secondary tier of vLLM's CPU offloading, its values in ``offloaded``;
``encoder`` keeps embeddings of images and sounds, by ``embeddings``. Only the entry points and ``metrics`` import vLLM.

Invariants: trouble with the sidecar is a miss, never an error of a request. What was computed over documents lies
under a salt of its own in vLLM's prefix cache, and is kept nowhere. A page is kept only when every token before it was
computed or loaded without a failure. Blocks are whole: a hit ends where a vLLM block does. Which blocks a windowed
layer still has, vLLM's own table says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_client.engines.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore_client.engines.vllm.versions import known_versions

    try:
        from kvstore_client.engines.vllm.connector import KVStoreConnector
    except ImportError as error:
        raise ImportError(
            f"kvstore's connector knows {known_versions()}; what is installed here lacks it: {error}"
        ) from error
    return KVStoreConnector
