"""What every engine imports: done once, in a process that engines are forked from."""

from __future__ import annotations

import vllm.model_executor.models.falcon_h1
import vllm.model_executor.models.gemma2
import vllm.model_executor.models.gemma3
import vllm.model_executor.models.granitemoehybrid
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.executor.multiproc_executor
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import kvatlas.engines.vllm.connector  # noqa: F401
import tests.vllm.engine_process  # noqa: F401
