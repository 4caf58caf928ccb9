"""Imported once by the process that ``vllm_engine`` forks engines from: their imports take longer than all else."""

from __future__ import annotations

import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.engine.core
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401 - imported for their time
