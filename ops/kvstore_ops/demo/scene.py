"""One scene: an engine process that answers one prompt through the sidecar, and prints what happened as JSON.

python -m kvstore_ops.demo.scene ADDRESS cold|warm|restarted
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

CONTEXT_TOKENS = 4096
QUESTION_TOKENS = 64
NEW_TOKENS = 16
STEP_TOKENS = 256


@dataclass
class Outcome:
    """The measurements of a scene, in seconds. ``one_pass_s`` is the same prefill in one forward pass, without kvstore.
    The stage fills in ``sidecar_pid`` and ``device_bytes``, the bytes that the sidecar read from the device
    meanwhile."""

    name: str
    pid: int
    token_count: int
    reused_token_count: int
    tier: str
    lookup_s: float
    fetch_s: float
    prefill_s: float
    ttft_s: float
    total_s: float
    one_pass_s: float
    fetched_bytes: int
    stored: str
    tokens: list[int]
    sidecar_pid: int = 0
    device_bytes: int = 0

    @property
    def best_ttft_s(self) -> float:
        """The better of stepped and one-pass prefill: the fair baseline."""
        return min(self.ttft_s, self.one_pass_s) if self.one_pass_s else self.ttft_s


def say(step: str) -> None:
    """Print the progress as JSON for the stage."""
    print(json.dumps({"step": step}), flush=True)


def play(address: str, name: str) -> Outcome:
    """Answer the prompt once through the sidecar, and return the measurements."""
    import torch
    from kvstore_client import connect
    from kvstore_client.engines.transformers import CachedModel

    from kvstore_ops.demo import model as demo_model
    from kvstore_ops.demo.text import prompt_tokens

    say("reading the documentation, training the tokenizer")
    prompt = torch.tensor([prompt_tokens(CONTEXT_TOKENS, QUESTION_TOKENS)])
    other = torch.tensor([prompt_tokens(STEP_TOKENS, QUESTION_TOKENS, offset=7)])
    say("building the model")
    model = demo_model.build()
    with connect(address) as client:
        cached = CachedModel(model, client)
        say("warming up on other text")
        with torch.inference_mode():
            model(other)
        say(f"answering {prompt.shape[1]:,} tokens")
        output = cached.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        report = output.report
        stored = report.wait_stored(60.0).name
        one_pass_s = 0.0
        if name == "cold":
            say("computing the same in one pass, without kvstore")
            with torch.inference_mode():
                started = time.perf_counter()
                model(prompt, logits_to_keep=1)
                one_pass_s = time.perf_counter() - started
        cached.close()
    return Outcome(
        name=name,
        pid=os.getpid(),
        token_count=report.token_count,
        reused_token_count=report.reused_token_count,
        tier=report.tier.name.lower(),
        lookup_s=report.lookup_s,
        fetch_s=report.fetch_s,
        prefill_s=report.prefill_s,
        ttft_s=report.ttft_s,
        total_s=report.total_s,
        one_pass_s=one_pass_s,
        fetched_bytes=report.fetched_bytes,
        stored=stored.lower(),
        tokens=output.sequences[0, prompt.shape[1] :].tolist(),
    )


if __name__ == "__main__":
    print(json.dumps({"outcome": asdict(play(sys.argv[1], sys.argv[2]))}), flush=True)
