"""Imported once by the process that engines are forked from."""

from __future__ import annotations

import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.engine.core
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401 - imported for their time
