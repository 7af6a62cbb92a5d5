"""A connector that reads nothing for requests that say so, and calls them read after a while.

What such a request takes beyond that while is vLLM's own: the steps in which it is scheduled,
found to be read, and scheduled again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvatlas.engines.vllm.connector import KVAtlasConnector
from kvatlas.engines.vllm.connector_messages import KVAtlasStep

SECONDS = "seconds_to_be_read"
"""What `kv_transfer_params` say of a request that is not read."""


@dataclass
class ControlStep(KVAtlasStep):
    """The same, and requests that are to be called read after so many seconds."""

    waits: dict[str, float] = field(default_factory=dict)


class ControlConnector(KVAtlasConnector):
    """KVAtlasConnector for all other requests."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._waits: dict[str, float] = {}
        self._due: dict[str, float] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """All tokens, where nothing is to be read."""
        if (request.kv_transfer_params or {}).get(SECONDS) is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        count = request.num_prompt_tokens - num_computed_tokens
        return (count, True) if count > 1 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note it, once."""
        seconds = (request.kv_transfer_params or {}).pop(SECONDS, None)
        if seconds is None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif num_external_tokens:
            self._waits[request.request_id] = seconds

    def build_connector_meta(self, scheduler_output: Any) -> ControlStep:
        """What workers have to do after this step."""
        waits, self._waits = self._waits, {}
        step = super().build_connector_meta(scheduler_output)
        return ControlStep(step.orders, step.idle, waits)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to wait."""
        super().start_load_kv(forward_context, **kwargs)
        step = self._get_connector_metadata()
        if isinstance(step, ControlStep):
            now = time.perf_counter()
            self._due |= {name: now + seconds for name, seconds in step.waits.items()}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has really been received, and what has waited long enough."""
        results = super().get_transfer_results(finished_req_ids)
        now = time.perf_counter()
        over = {name for name, due in self._due.items() if due <= now}
        for name in over:
            del self._due[name]
        received = (results.finished_recving or set()) | over
        return KVConnectorTransferResults(
            results.finished_sending, received, results.failed_recving
        )
