"""A real vLLM engine in a process of its own: prompts go in over a pipe, seconds and tokens come out."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvstore.errors import Unavailable

START_S_MAX = 180.0
ANSWER_S_MAX = 300.0
END_S_MAX = 30.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Asked:
    """A prompt. ``salt`` and ``transfer``: the request's ``cache_salt`` and ``kv_transfer_params``; empty: none.
    ``is_anew``: vLLM forgets its own cached prefixes before it."""

    tokens: list[int]
    max_tokens: int = 1
    salt: str = ""
    transfer: dict[str, Any] = field(default_factory=dict)
    is_anew: bool = False


class Answer(NamedTuple):
    """The answer to one prompt, and the seconds that it took: those to the first token where there is only one."""

    seconds: float
    tokens: list[int]


class Engine:
    """vLLM with a model; with the connector where it is given a sidecar's ``address``, with settings of its own where
    ``extra`` has some. It starts when it is made. Without other ``options`` the model has random weights, and vLLM's
    own prefix cache is off: every prompt is computed."""

    def __init__(
        self, model: Path, address: str | None, token_count_max: int, threads: int, *,
        extra: dict[str, Any] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(threads))
        options = {
            "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
            "enable_prefix_caching": False, "block_size": 32, "dtype": "float32", "max_model_len": token_count_max,
            "max_num_batched_tokens": token_count_max, "distributed_executor_backend": "uni", **options,
        }  # fmt: skip
        if address is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_client.engines.vllm",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "address": address, "weights_digest": "unverified:bench", **(extra or {})
                },
            }  # fmt: skip
        self._log = tempfile.NamedTemporaryFile("w+", prefix="vllm-", suffix=".log")  # noqa: SIM115 - closed on exit
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([f"{__package__}.vllm_imports"])
        self._pipe, theirs = forks.Pipe()
        self._process = forks.Process(target=serve, args=(options, self._log.name, theirs))
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Return when it takes prompts. Raises Unavailable with vLLM's last words when it does not start."""
        self._answer(START_S_MAX)

    def first_token_s(self, prompts: list[list[int]]) -> list[float]:
        """Return the seconds to the first token of each prompt, sent one after another without a pause."""
        return [each.seconds for each in self.ask([Asked(each) for each in prompts])]

    def ask(self, prompts: list[Asked]) -> list[Answer]:
        """Return the answers to prompts that are sent one after another without a pause."""
        self._pipe.send(prompts)
        return list(self._answer(ANSWER_S_MAX))

    def _answer(self, timeout_s: float) -> Any:
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except EOFError:
            pass
        raise Unavailable(f"vLLM gave no answer within {timeout_s} s: {Path(self._log.name).read_text()[-3000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(END_S_MAX)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.close()


def serve(options: dict[str, Any], log: str, pipe: Any) -> None:
    """Run the engine's process: answer lists of prompts until the pipe ends."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    from vllm import LLM

    llm = LLM(**options)
    pipe.send("ready")
    while True:
        try:
            prompts = pipe.recv()
        except EOFError:
            break
        pipe.send([_answered(llm, each) for each in prompts])
    llm.llm_engine.engine_core.shutdown()


def _answered(llm: Any, asked: Asked) -> Answer:
    from vllm import SamplingParams

    if asked.is_anew:
        llm.reset_prefix_cache()
    transfer = {"kv_transfer_params": asked.transfer} if asked.transfer else None
    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked.max_tokens, detokenize=False, ignore_eos=True, extra_args=transfer
    )  # fmt: skip
    prompt: dict[str, Any] = {"prompt_token_ids": asked.tokens}
    if asked.salt:
        prompt["cache_salt"] = asked.salt
    began_s = time.perf_counter()
    (done,) = llm.generate(prompt, sampling, use_tqdm=False)
    return Answer(time.perf_counter() - began_s, list(done.outputs[0].token_ids))
