"""Rows with text: chat messages or prompts, as OpenAI, LMCache, AIPerf and SGLang write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from kvatlas.simulate.traces.line_format import Fields, LineFormat, counted, seconds
from kvatlas.simulate.traces.text_tokens import TextTokens
from kvatlas.simulate.traces.trace_builder import TraceRequest

_NONE = msgspec.Raw()


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: str = ""
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = _NONE


class _Body(msgspec.Struct):
    messages: list[ChatMessage] | None = None
    prompt: str | list[int | str] | None = None
    tools: msgspec.Raw = _NONE


class _Row(_Body):
    body: _Body | None = None
    """The request of a batch file."""
    input: str | list[ChatMessage] | None = None
    text_input: str | None = None
    output_length: int | None = None
    timestamp: float | str | None = None
    """Milliseconds; in rows of LMCache, seconds."""
    delay: float | None = None
    pre_gap: float | None = None
    """Seconds after the previous answer of the session."""
    session_id: str | int | None = None


class ChatRows(LineFormat):
    """A format with one request per line. The line contains messages, or a prompt as text."""

    row: ClassVar[Any] = _Row
    unused = "custom_id method url model max_tokens temperature"
    example = 'messages: [{"role", "content"}], prompt, or a batch row with body'

    def __init__(self, block: int | None, text: TextTokens) -> None:
        super().__init__(block, text)
        self._parts: Counter[str] = Counter()
        """Number of message parts that are not text, by type."""
        self._sessions: dict[str | int, float] = {}

    @classmethod
    def fits(cls, fields: Fields) -> bool:
        """Return whether a row has messages or a prompt."""
        names = ("messages", "body", "prompt", "input", "text_input")
        return not fields.keys().isdisjoint(names)

    def requests(self, where: str, row: Any) -> Iterable[TraceRequest]:  # noqa: ARG002
        """Yield the request of a row.

        If the last message is from the assistant, it is the answer: it counts as output and not as
        a part of the prompt.
        """
        body = row.body or row
        prompt = next((x for x in (body.prompt, row.text_input, row.input) if x is not None), None)
        messages = body.messages if prompt is None else prompt
        if messages is None:
            raise ValueError("neither messages nor a prompt")
        output = row.output_length
        time = self._time(row)
        if isinstance(messages, str):
            tokens = [*self.text.of(messages)]
        elif messages and not isinstance(messages[0], ChatMessage):
            tokens = self._mixed(messages)
        else:
            answered = len(messages) > 1 and messages[-1].role == "assistant"
            if answered and output is None:
                output = len(self.tokens(messages[-1:]))
            tokens = [*self.text.of(bytes(body.tools).decode())] if body.tools else []
            tokens += self.tokens(messages[:-1] if answered else messages)
        yield self.of_tokens(tokens, output or 0, time)

    def _mixed(self, prompt: Sequence[int | str]) -> list[int]:
        """Return the tokens of a prompt that is a list of token ids or of texts."""
        parts = ((one,) if isinstance(one, int) else self.text.of(one) for one in prompt)
        return [token for part in parts for token in part]

    def tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens of messages. The role of each message is put before its text."""
        found: list[int] = []
        for one in messages:
            parts = [_Part(text=one.content)] if isinstance(one.content, str) else one.content
            texts = [part.text for part in parts or () if part.text is not None]
            self._parts.update(part.type for part in parts or () if part.text is None)
            texts += [bytes(one.tool_calls).decode()] if one.tool_calls else []
            found += self.text.of("\n".join([one.role, *texts, ""]))
        return found

    def _time(self, row: Any) -> float | None:
        """Return the arrival time of a row in seconds; None if the row has no time.

        The time is stored for the row's session, because a later row of the session may have only a
        delay after this time.
        """
        time = seconds(row.timestamp, 0.001 if row.input is None else 1.0)
        gap = row.pre_gap if row.delay is None else row.delay / 1000
        if time is None and gap is not None:
            time = self._sessions.get(row.session_id, 0.0) + gap
        if time is not None and row.session_id is not None:
            self._sessions[row.session_id] = time
        return time

    def remarks(self) -> list[str]:
        """Return sentences for the user about the rows that were read."""
        told = super().remarks()
        if self._parts:
            told.append(f"Message parts without text have no tokens here: {counted(self._parts)}.")
        return told
