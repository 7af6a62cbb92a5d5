"""ShareGPT: conversations as text, each with several turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvatlas.simulate.traces.chat_rows import ChatMessage, ChatRows
from kvatlas.simulate.traces.line_format import Fields
from kvatlas.simulate.traces.trace_builder import TraceRequest

_ANSWERS = ("gpt", "chatgpt", "bard", "assistant", "model", "bing")


class _Turn(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from", default="")


class _Row(msgspec.Struct):
    conversations: list[_Turn]


class ShareGpt(ChatRows):
    """A format with one conversation per row.

    Each answer counts as one request, whose prompt is everything before the answer.
    """

    row = _Row
    unused = "id"
    example = 'conversations: [{"from": "human" or "gpt", "value": text}]'

    @classmethod
    def fits(cls, fields: Fields) -> bool:
        """Return whether a row has conversations."""
        return "conversations" in fields

    def requests(self, where: str, row: Any) -> Iterable[TraceRequest]:  # noqa: ARG002
        """Yield one request for each answer of a conversation."""
        prompt: list[int] = []
        for turn in row.conversations:
            tokens = self.tokens([ChatMessage(turn.speaker, turn.value)])
            if turn.speaker in _ANSWERS and prompt:
                yield self.of_tokens(prompt, len(tokens))
            prompt += tokens
