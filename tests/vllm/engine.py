"""A real vLLM engine in a process of its own, asked over a pipe: one JSON line in, one out.

{"prompts": [[token, ...], ...], "max_tokens": 8, "images": [seed, ...]}
{"outputs": [[token, ...], ...], "cached": [count, ...], "preemptions": count}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S = 180.0
ANSWER_S = 120.0
CONNECTOR = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "kvstore_client.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
OPTIONS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "dtype": "float32",
    "disable_log_stats": False,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


class Engine:
    """Started on entry, ended on exit. ``preemptions``: how often vLLM has preempted a request so far.

    ``address``: the sidecar's; None: vLLM without kvstore. ``extra``: settings of the connector; ``connector``: what of
    ``CONNECTOR`` differs. ``is_one_process``: vLLM's scheduler and worker run in the process that was started, which is
    up in a third of the time; else each in one of its own, as it is by default. Raises RuntimeError with vLLM's last
    words when it does not start.
    """

    def __init__(
        self, model: Path, address: str | None, *, extra: dict[str, Any] | None = None,
        connector: dict[str, Any] | None = None, is_one_process: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        self._options: dict[str, Any] = {**OPTIONS, "model": str(model), **options}
        if address is not None:
            settings = {"address": address, **(extra or {})}
            chosen = {**CONNECTOR, **(connector or {})}
            self._options["kv_transfer_config"] = {**chosen, "kv_connector_extra_config": settings}
        self._environment = dict(ENVIRONMENT)
        if is_one_process:
            self._environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            self._options["distributed_executor_backend"] = "uni"
        self._log = tempfile.NamedTemporaryFile("w+", prefix="vllm-", suffix=".log")  # noqa: SIM115 - closed on exit
        self._process: subprocess.Popen[str] | None = None
        self.preemptions = 0

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.vllm.engine", json.dumps(self._options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **self._environment},
        )  # fmt: skip
        try:
            assert self._line(START_S) == {"ready": True}
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def kill(self, *prompts: list[int]) -> None:
        """``kill -9`` while it answers these prompts. Only an engine of one process."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": 64}) + "\n")
        process.stdin.flush()
        time.sleep(0.3)
        process.kill()
        process.wait()

    def _line(self, timeout_s: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
        finally:
            timer.cancel()
        raise RuntimeError(f"vLLM gave no answer within {timeout_s} s: {self.log()[-6000:]}")

    def ask(self, *prompts: list[int], max_tokens: int = 8, **more: Any) -> tuple[list[list[int]], list[int]]:
        """(the greedy tokens after each prompt, how many of its tokens were not computed)."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens, **more}) + "\n")
        self._process.stdin.flush()
        reply = self._line(ANSWER_S)
        self.preemptions = reply["preemptions"]
        return reply["outputs"], reply["cached"]


def _picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8))


def serve(options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log
    llm = LLM(**options)

    def answer(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        query = json.loads(line)
        if query.get("reset"):
            llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_tokens=query["max_tokens"], detokenize=False, ignore_eos=True)
        salt = {"cache_salt": query["salt"]} if query.get("salt") else {}
        prompts = [{"prompt_token_ids": each, **salt} for each in query["prompts"]]
        for prompt, seed in zip(prompts, query.get("images", ()), strict=False):
            prompt["multi_modal_data"] = {"image": _picture(seed)}
        lora = (
            LoRARequest(query["lora"], abs(hash(query["lora"])) % 1000 + 1, query["lora"])
            if query.get("lora")
            else None
        )
        done = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        answer(
            {
                "outputs": [list(each.outputs[0].token_ids) for each in done],
                "cached": [each.num_cached_tokens for each in done],
                "preemptions": sum(each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions"),
            }
        )


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
