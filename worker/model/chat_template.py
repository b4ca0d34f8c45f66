"""Chats as tokens, by the chat template that a model brings, with the tokens of the answers marked.

A template is a program of Jinja that others wrote: it is rendered by transformers' own sandbox, in a child process
with limits (`worker.model.sandbox`).
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jinja2 import Undefined, meta
from jinja2.utils import missing
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from tessera.shared.tensors.lazy import Array
from tessera.worker.errors import DataError, in_short
from tessera.worker.model.chats import BEGIN, END, Chat, ChatRequest

MAX_RENDERED = 1 << 22
"""Limit on the characters of a rendered chat, which has at most a quarter of it in its messages."""
RENDER_SECONDS = 5.0
"""Limit on the processor time of one chat. Published templates need milliseconds."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The mark before an answer in a template."""
UNSTABLE = {"globals": ("strftime_now", "lipsum"), "filters": ("random",)}
"""Functions whose result is not the same each time."""
ABSENT = frozenset({"tools", "documents"})
"""Variables that are None for every chat."""


def write_tokens(request: ChatRequest) -> None:
    """Write the chats of a request as tokens, or the first fault, to its file."""
    ids, scored, endless, place = list[Array](), list[Array](), 0, 0
    try:
        encoder = ChatEncoder(request)
        for place, chat in enumerate(request.chats):  # noqa: B007  (a fault names the last one)
            with _time_limit():
                of_chat, marks, has_end = encoder.encode(chat)
            ids.append(np.array(of_chat, np.int32))
            scored.append(np.array(marks, bool))
            endless += not has_end
    except Exception as fault:  # noqa: BLE001  (a template may raise any)
        save_file({}, request.result, {"place": str(place), "fault": _reason(fault, request.template)})
        return
    lengths: Array = np.array(list(map(len, ids)), np.int64)
    tensors = {"lengths": lengths, "ids": np.concatenate(ids), "scored": np.concatenate(scored)}
    save_file(tensors, request.result, {"endless": str(endless)})


def _reason(fault: Exception, template: str | None) -> str:
    if isinstance(fault, MemoryError):
        return "it needs more memory than it may use"
    reason = in_short(fault) or type(fault).__name__
    if isinstance(fault, TypeError) and template:
        read = meta.find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))
        reason += f" (a chat has no {' or '.join(sorted(read & ABSENT))})" if read & ABSENT else ""
    return reason


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise TimeoutError after `RENDER_SECONDS` of processor time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {RENDER_SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class AbsentVariable(Undefined):
    """A variable that no chat has, or a key that a message has not. A template may ask whether a variable is there,
    but not write it."""

    __slots__ = ()

    def _require(self) -> None:
        if self._undefined_obj is missing:
            self._fail_with_undefined_error()

    def __str__(self) -> str:
        self._require()
        return ""

    def __iter__(self) -> Iterator[Any]:
        self._require()
        return iter(())


class ChatEncoder:
    """The conversion of chats to tokens, with a tokenizer and a template that others wrote."""

    def __init__(self, request: ChatRequest) -> None:
        """Compile the template. Raises the exceptions of the tokenizer and of Jinja."""
        self._template, self._special, self._all_tokens = request.template, request.special, request.all_tokens
        document = {**json.loads(request.tokenizer), "truncation": None, "padding": None}
        whole, added = Tokenizer.from_str(json.dumps(document)), document.get("added_tokens") or []
        start = whole.token_to_id(request.special.get("bos_token", ""))
        self._start = [start] if start is not None and whole.encode("").ids[:1] == [start] else []
        """The token that the tokenizer puts before a text."""
        self._end = whole.token_to_id(request.special.get("eos_token", ""))
        # It adds special tokens, or takes spaces out of the places of tokens.
        document["post_processor"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(document))
        self._without_added = Tokenizer.from_str(json.dumps({**document, "added_tokens": []}))
        # Tokens that are not special may stand for spaces. Templates of some models write turns with such tokens.
        self._control = {
            each["content"]: int(each["id"])
            for each in added
            if each.get("special") or (each["content"].strip() and each["content"] in (self._template or ""))
        }
        longest = sorted(filter(None, self._control), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._marked = re.compile(f"{BEGIN}({self._control_pattern.pattern}){END}|[{BEGIN}{END}]")
        if self._template is not None:
            with _time_limit():
                environment = _compile_jinja_template(self._template).environment
            environment.undefined = AbsentVariable
            for place, names in UNSTABLE.items():
                for name in names:
                    getattr(environment, place).pop(name, None)

    def encode(self, chat: Chat) -> tuple[list[int], list[bool], bool]:
        """Return a chat's tokens, whether each is scored, and whether a token ends each answer.

        Raises DataError, and the exceptions of the template.
        """
        chat = chat.model_copy(update={"turns": tuple((role, self._mark(text)) for role, text in chat.turns)})
        if chat.plain:
            text = "".join(chat.contents)
            ids, scored = self._tokens(text, [(sum(map(len, chat.contents[: chat.scored_from])), len(text))])
            end = [] if self._end is None else [self._end]
            ids, scored = [*self._start, *ids, *end], [False] * len(self._start) + scored + [True] * len(end)
            has_end = bool(end)
        else:
            text = self._rendered(chat, len(chat.turns))
            spans = [] if self._all_tokens else list(self._answers(chat, text))
            ids, scored = self._tokens(text, spans)
            if not (any(scored) or self._all_tokens):
                raise DataError(
                    "it writes no part of an answer, or marks none: correct it, with {% generation %} and "
                    "{% endgeneration %}, if it has them, around each answer"
                )
            has_end = all(self._ends(text[:end]) for _, end in spans)
        return ids, [True] * len(ids) if self._all_tokens else scored, has_end

    def _mark(self, content: str) -> str:
        return self._control_pattern.sub(f"{BEGIN}\\g<0>{END}", content)

    def _rendered(self, chat: Chat, turns: int, *, prompts: bool = False, found: list[Any] | None = None) -> str:
        """Return the first turns as the template writes them, with the beginning of an answer if it `prompts`.

        Add the places between the template's own marks of answers to `found`. Raises DataError.
        """
        messages = [{"role": role, "content": content} for role, content in chat.turns[:turns]]
        render: Any = render_jinja_template
        texts, places = render(
            [messages],
            chat_template=self._template,
            add_generation_prompt=prompts,
            return_assistant_tokens_mask=found is not None,
            **self._special,
        )
        text: str = texts[0]
        if len(text) > MAX_RENDERED:
            raise DataError(f"it makes {len(text):,} characters of one chat; {MAX_RENDERED:,} are taken")
        if found is not None:
            found += places[0]
        return text

    def _answers(self, chat: Chat, text: str) -> Iterator[tuple[int, int]]:
        """Yield the place of each answer in the rendered text, with the token that ends its turn."""
        if GENERATION.search(self._template or ""):
            found: list[tuple[int, int]] = []
            self._rendered(chat, len(chat.turns), found=found)
            before = self._rendered(chat, chat.scored_from) if chat.scored_from else ""
            self._require_prefix(before, text, chat.scored_from)
            for begin, end in found:
                # A mark may be around the control tokens of an empty answer.
                if begin >= len(before) and self._control_pattern.sub("", text[begin:end]).strip():
                    yield begin, self._turn_end(text, begin, end)
            return
        for place in chat.answers:
            before = self._rendered(chat, place, prompts=True)
            after = text if place + 1 == len(chat.turns) else self._rendered(chat, place + 1)
            self._require_prefix(before, after, place)
            self._require_prefix(after, text, place)
            yield len(before), self._turn_end(after, len(before), len(after))

    def _turn_end(self, text: str, begin: int, end: int) -> int:
        """Return the end of an answer with the token that ends its turn, and without spaces after it."""
        if self._ends(stripped := text[begin:end].rstrip()):
            return begin + len(stripped)
        follows = self._control_pattern.match(text, end)
        return follows.end() if follows else end

    def _ends(self, text: str) -> bool:
        return text.endswith(tuple(self._control))

    @staticmethod
    def _require_prefix(before: str, text: str, place: int) -> None:
        if not text.startswith(before):
            raise DataError(
                f"it writes what is before message {place} in another way once that message follows, so that the "
                "answer cannot be located: put {% generation %} and {% endgeneration %} around answers in the "
                'template, or set loss_on = "all"'
            )

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text with marks, and whether each has a character in one of these places."""
        answers = np.zeros(len(text) + 1, bool)
        for begin, end in spans:
            answers[begin:end] = True
        ids, scored, begin = list[int](), list[bool](), 0
        marks = list(self._marked.finditer(text))
        for mark in [*marks, None]:
            end = mark.start() if mark else len(text)
            self._add(self._tokenizer, text[begin:end], answers[begin : end + 1], ids, scored, is_first=begin == 0)
            if mark and mark[1]:
                count = len(ids)
                at = answers[mark.start(1) : mark.end(1) + 1]
                self._add(self._without_added, mark[1], at, ids, scored, is_first=begin == end == 0)
                if self._control[mark[1]] in ids[count:]:
                    raise DataError(f"a message has {mark[1]!r}, which the tokenizer cannot read as text: remove it")
            begin = mark.end() if mark else end
        return ids, scored

    @staticmethod
    def _add(
        tokenizer: Tokenizer, piece: str, answers: Array, ids: list[int], scored: list[bool], *, is_first: bool
    ) -> None:
        """Add the tokens of a piece of a text."""
        if not piece:
            return
        # At the beginning of a text, some tokenizers add a space, which must not come between two pieces.
        before = "" if is_first else "\n"
        encoded, skipped = tokenizer.encode(before + piece), len(tokenizer.encode(before)) if before else 0
        if before and encoded.ids[:skipped] != tokenizer.encode(before).ids:
            encoded, skipped, before = tokenizer.encode(piece), 0, ""
        ids += encoded.ids[skipped:]
        begins, ends = np.array(encoded.offsets[skipped:], np.int64).reshape(-1, 2).T - len(before)
        count = np.append(0, answers.cumsum())
        scored += (count[np.maximum(ends, begins + 1)] > count[begins]).tolist()
