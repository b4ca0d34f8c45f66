"""Chats, and the request and the result of their conversion to tokens in a child process (`chat_template`)."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated

from pydantic import Field
from safetensors import SafetensorError, safe_open

from tessera.shared.schema import Value
from tessera.shared.tensors.lazy import Array

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
BEGIN, END = "\U000f0000", "\U000f0001"
"""Characters for private use that the conversion puts around control tokens in a message, which may have none."""


class Chat(Value):
    """A conversation, or a text and its continuation."""

    turns: Annotated[tuple[tuple[str, str], ...], Field(min_length=1)]
    """The role and the content of each message."""
    scored_from: int = 0
    """The first turn that may be scored: a prompt's own answers are not."""
    plain: bool = False
    """True for a prompt and its completion as texts, which need no template."""
    choices: Annotated[tuple[str, ...], Field(exclude_if=operator.not_)] = ()
    """The answers that a question offers."""
    right: Annotated[int, Field(exclude_if=operator.not_)] = 0
    """The place of the right one, which is the last turn."""
    rejected: Annotated[tuple[tuple[str, str], ...], Field(exclude_if=operator.not_)] = ()
    """Of a pair, the turns that are worse than those from `scored_from` on."""

    @property
    def contents(self) -> tuple[str, ...]:
        return tuple(content for _, content in self.turns)

    @property
    def texts(self) -> tuple[str, ...]:
        """The messages, and the answers that are offered or rejected."""
        return (*self.contents, *self.choices, *(content for _, content in self.rejected))

    @property
    def sides(self) -> tuple[Chat, ...]:
        """The rejected chat and the chosen one of a pair, or else this chat."""
        if not self.rejected:
            return (self,)
        chosen = self.model_copy(update={"rejected": ()})
        return chosen.model_copy(update={"turns": (*self.turns[: self.scored_from], *self.rejected)}), chosen

    def answered(self, text: str) -> Chat:
        """Return the chat with another last turn."""
        return Chat(turns=(*self.turns[:-1], (ASSISTANT, text)), scored_from=self.scored_from)

    @property
    def answers(self) -> list[int]:
        """The turns that may be scored. From an empty one a model would learn to answer nothing."""
        after = range(self.scored_from, len(self.turns))
        return [n for n in after if (self.plain or self.turns[n][0] == ASSISTANT) and self.turns[n][1].strip()]


class ChatRequest(Value):
    """Chats that a child process converts to tokens."""

    tokenizer: str
    """The content of `tokenizer.json`."""
    template: str | None
    special: dict[str, str]
    """The special tokens by name, such as `bos_token`."""
    chats: tuple[Chat, ...]
    all_tokens: bool
    """True to score every token, and not those of answers alone."""
    result: str
    """The file to which the child writes its result."""


class ChatFault(ValueError):
    """The reason for which the chat at a `place` of a request cannot become tokens."""

    def __init__(self, place: int, fault: str) -> None:
        super().__init__(fault)
        self.place = place


class ChatTokens:
    """The result of a request."""

    def __init__(self, file: Path) -> None:
        """Read a child's file. Raises ChatFault."""
        try:
            self._read(file)
        except (OSError, SafetensorError) as fault:
            raise ChatFault(0, "its process wrote no result; the disk of its temporary folder may be full") from fault

    def _read(self, file: Path) -> None:
        with safe_open(file, "numpy") as result:
            notes = result.metadata() or {}
            if "fault" in notes:
                raise ChatFault(int(notes["place"]), notes["fault"])
            self.lengths: Array = result.get_tensor("lengths")  # int64 [chats]
            self.ids: Array = result.get_tensor("ids")  # int32 [tokens of all chats]
            self.scored: Array = result.get_tensor("scored")  # bool [tokens of all chats]
        self.endless = int(notes["endless"])
        """The number of chats with an answer after which no token ends the turn."""
