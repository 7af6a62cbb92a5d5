"""A tiny model on the GPU, its cache on a wire."""

from __future__ import annotations

from typing import Any

import torch

from kvatlas.engines.transformers import AtlasCache
from kvatlas.wire import Node, make_transport
from tests.gpu.ranks import OPTIONS
from tests.handover.tiny import LONGEST, NEW, PROMPT, model_of, prompt
from tests.identities import OURS

NUMBER = 5


class Generating:
    """A model and a cache of one process, which is a node."""

    def __init__(self, name: str, transport: str, **plan: Any) -> None:
        self.model = model_of(name).to("cuda")
        self.cache = AtlasCache.from_config(
            self.model.config, batch=1, max_len=LONGEST, device="cuda:0", **plan
        )
        self.node = Node(
            self.cache.plan,
            memory=self.cache.cache,
            transport=make_transport(transport, **OPTIONS.get(transport, {})),
            piece=64 << 10,
            identity=OURS,
        )

    def prefill(self) -> int:
        """Fill the cache with the prompt; the first token."""
        return self._generate(prompt(NUMBER).to("cuda"), 1)[0]

    def go_on(self, first: int) -> list[int]:
        """The tokens from the first one on, on what the cache holds."""
        ids = torch.cat((prompt(NUMBER), torch.tensor([[first]])), dim=1).to("cuda")
        return self._generate(ids, NEW - 1)

    def _generate(self, ids: torch.Tensor, count: int) -> list[int]:
        with torch.no_grad():
            ids = self.model.generate(
                ids, past_key_values=self.cache, max_new_tokens=count, do_sample=False
            )
        return ids[0, PROMPT:].tolist()


def undisturbed(name: str) -> list[int]:
    """What the model says when nobody moves its cache."""
    model = model_of(name).to("cuda")
    with torch.no_grad():
        ids = model.generate(prompt(NUMBER).to("cuda"), max_new_tokens=NEW, do_sample=False)
    return ids[0, PROMPT:].tolist()  # type: ignore[no-any-return]
