"""A real vLLM engine in a process of its own, for ``vllm-cold``: prompts go in over a pipe, seconds come out."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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


class Engine:
    """vLLM with a model of random weights, whose configuration lies in ``model``; with the connector where it is given
    a sidecar's ``address``. It starts when it is made. Its own prefix cache is off: every prompt is computed."""

    def __init__(self, model: Path, address: str | None, token_count_max: int, threads: int) -> None:
        os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(threads))
        options: dict[str, Any] = {
            "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
            "enable_prefix_caching": False, "block_size": 32, "dtype": "float32", "max_model_len": token_count_max,
            "max_num_batched_tokens": token_count_max, "distributed_executor_backend": "uni",
        }  # fmt: skip
        if address is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore_client.engines.vllm",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"address": address, "weights_digest": "unverified:bench"},
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
    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    one = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
    pipe.send("ready")
    while True:
        try:
            prompts = pipe.recv()
        except EOFError:
            break
        took_s = []
        for prompt in prompts:
            began_s = time.perf_counter()
            llm.generate({"prompt_token_ids": prompt}, one, use_tqdm=False)
            took_s.append(time.perf_counter() - began_s)
        pipe.send(took_s)
    llm.llm_engine.engine_core.shutdown()
