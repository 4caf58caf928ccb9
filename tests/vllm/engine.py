"""A real vLLM engine in a process of its own, asked over a pipe: one question in, one answer out.

{"prompts": [[token, ...], ...], "max_tokens": 8, "images": [seed, ...]}
{"outputs": [[token, ...], ...], "cached": [count, ...], "preemptions": count, "accepted": count}
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
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
_ADAPTERS: dict[str, int] = {}  # vLLM's numbers of them, in an engine's own process


class Engine:
    """Started on entry, ended on exit. ``preemptions``: how often vLLM has preempted a request so far; ``accepted``:
    the drafted tokens that were the model's own; ``loaded``: the tokens that vLLM has from the connector; ``counted``:
    the connector's own metrics; ``held``: what pages hold of its last answers (see ``RememberingConnector``).

    ``address``: the sidecar's; None: vLLM without kvstore. ``extra``: settings of the connector; ``connector``: what of
    ``CONNECTOR`` differs. ``is_one_process``: vLLM's scheduler and worker run in one process; else each in one of its
    own, as it is by default. Raises RuntimeError with vLLM's last words when it does not start.

    Engines are forked from a process that has imported vLLM already, which takes longer than all else.
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
        self._environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if is_one_process else "1"}
        if is_one_process:
            self._options["distributed_executor_backend"] = "uni"
        self._log = tempfile.NamedTemporaryFile("w+", prefix="vllm-", suffix=".log")  # noqa: SIM115 - closed on exit
        self._process: Any = None
        self._pipe: Any = None
        self.preemptions = self.accepted = self.loaded = 0
        self.held: list[dict[int, tuple[int, Any]]] = []
        self.counted: dict[str, float] = {}

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def __enter__(self) -> Self:
        os.environ.update(ENVIRONMENT)
        nursery = multiprocessing.get_context("forkserver")
        nursery.set_forkserver_preload(["tests.vllm.nursery"])
        self._pipe, theirs = nursery.Pipe()
        given = (self._options, self._environment, self._log.name, theirs)
        self._process = nursery.Process(target=serve, args=given)
        self._process.start()
        theirs.close()
        try:
            assert self._answer(START_S) == {"ready": True}
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._pipe.close()
            process.join(60.0)
            if process.is_alive():
                process.kill()
                process.join()

    def kill(self, *prompts: list[int]) -> None:
        """``kill -9`` while it answers these prompts. Only an engine of one process."""
        assert self._process is not None
        self._pipe.send({"prompts": prompts, "max_tokens": 64})
        time.sleep(0.3)
        self._process.kill()
        self._process.join()

    def _answer(self, timeout_s: float) -> Any:
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except EOFError:
            pass
        raise RuntimeError(f"vLLM gave no answer within {timeout_s} s: {self.log()[-6000:]}")

    def ask(self, *prompts: list[int], max_tokens: int = 8, **more: Any) -> tuple[list[list[int]], list[int]]:
        """(the greedy tokens after each prompt, how many of its tokens were not computed)."""
        self._pipe.send({"prompts": prompts, "max_tokens": max_tokens, **more})
        reply = self._answer(ANSWER_S)
        self.preemptions, self.accepted = reply["preemptions"], reply["accepted"]
        self.held, self.loaded, self.counted = reply["held"], reply["loaded"], reply["counted"]
        return reply["outputs"], reply["cached"]


def _picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8))


def serve(options: dict[str, Any], environment: dict[str, str], log: str, pipe: Any) -> None:
    """The engine's process: answer what comes until the pipe ends."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    from vllm import LLM

    llm = LLM(**options)
    pipe.send({"ready": True})
    while True:
        try:
            query = pipe.recv()
        except EOFError:
            break
        pipe.send(_answered(llm, query))
    llm.llm_engine.engine_core.shutdown()


def _answered(llm: Any, query: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    transfer = {"kv_transfer_params": query["transfer"]} if query.get("transfer") else None
    sampling = SamplingParams(
        temperature=0.0, max_tokens=query["max_tokens"], detokenize=False, ignore_eos=True, extra_args=transfer
    )  # fmt: skip
    salt = {"cache_salt": query["salt"]} if query.get("salt") else {}
    prompts = [{"prompt_token_ids": each, **salt} for each in query["prompts"]]
    for prompt, seed in zip(prompts, query.get("images", ()), strict=False):
        prompt["multi_modal_data"] = {"image": _picture(seed)}
    name = query.get("lora")
    lora = LoRARequest(name, _ADAPTERS.setdefault(name, len(_ADAPTERS) + 1), name) if name else None
    done = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
    counted = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    ended = sys.modules.get("tests.vllm.breaking")
    held = ended.RememberingConnector.ended[-len(done) :] if ended else []
    return {
        "held": held,
        "counted": {name: value for name, value in counted.items() if "kvstore" in name},
        "loaded": counted.get("vllm:external_prefix_cache_hits", 0),
        "outputs": [list(each.outputs[0].token_ids) for each in done],
        "cached": [each.num_cached_tokens for each in done],
        "preemptions": counted["vllm:num_preemptions"],
        "accepted": counted.get("vllm:spec_decode_num_accepted_tokens", 0),
    }
