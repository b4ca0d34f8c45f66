"""Conversations, prompts with completions, or instructions with outputs, on which a language model learns answers;
and prompts with a better and a worse answer.

[datasets.questions]
kind = "chat"
file = "/data/questions.jsonl"
tokenizer = "run"
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from transformers import PreTrainedTokenizerBase

from tessera.shared.model.dataset_schema import ANSWERS, IDS
from tessera.worker.data.cells import Cells
from tessera.worker.data.dataset import LABELS, Adapter, Choices, Dataset, RawTexts, Shape, schema_of
from tessera.worker.data.kinds.text import TokenFile, over_in_words
from tessera.worker.data.load_report import LoadReport, by_suffix
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.data.readers.table_files import TableOptions
from tessera.worker.data.readers.tables import DataTable, Files, digest_of, read_table, table_name
from tessera.worker.data.readers.tokenizer import MAX_TOKENS, RUN, TokenCounts, tokenized_here, tokenizer_of
from tessera.worker.data.readers.tokens import MASK, TokenBatch
from tessera.worker.errors import DataError, NoChatTemplate, UnsafeConfig
from tessera.worker.model.chats import ASSISTANT, BEGIN, END, SYSTEM, USER, Chat, ChatFault, ChatRequest, ChatTokens
from tessera.worker.model.forward import IGNORED
from tessera.worker.model.sandbox import Sandbox

FORMAT = 2
"""The number of the way in which chats become tokens, which is part of their files' names."""
MAX_CHARACTERS = 1 << 20
"""Limit on the characters of a chat: eight times as many as 32,768 tokens of English have."""
MAX_JSON = 8 * MAX_CHARACTERS
"""Limit on the characters of a list of messages that is written as JSON."""
AT_ONCE, CHARACTERS_AT_ONCE = 8192, 1 << 23
"""Numbers of chats, and of their characters, that a child process converts together."""
MAX_CHOICES = 26
"""Limit on the answers that a question offers: as many as there are letters."""
MAX_SHOWN = 2000
"""Number of characters of the chat that is shown."""

Layout = Literal["messages", "prompt", "instruction", "choice", "preference"]
COLUMNS: dict[Layout, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "choice": ("question", "choices", "answer"),
    "preference": ("chosen", "rejected"),
}
"""The columns of each layout, by the options that name them."""


class ChatOptions(TableOptions):
    file: Files = Field(
        description="a table: a file, a list of files, a pattern, a folder of shards, or one that `datasets` saved"
    )
    layout: Layout | None = Field(
        default=None,
        description="the columns to read: messages, prompt, instruction, choice or preference; unset, those there",
    )
    messages: str = Field(default="messages", description="column: a list of messages, each with role and content")
    prompt: str = Field(default="prompt", description="column: a text, or a list of messages")
    completion: str = Field(default="completion", description="column: the text or messages that follow the prompt")
    instruction: str = Field(default="instruction", description="column: the user's message")
    input: str = Field(default="input", description="column, if there is one: a text after the instruction")
    output: str = Field(default="output", description="column: the answer to the instruction")
    question: str = Field(default="question", description="column: the user's message, or a list of messages")
    choices: str = Field(
        default="choices", description="column: a list of answers, or an object of answers by letter"
    )
    answer: str = Field(
        default="answer", description="column: the place of the right one (from 0), its letter or text"
    )
    chosen: str = Field(
        default="chosen", description="column: the better answer to `prompt`, or a list of messages with it"
    )
    rejected: str = Field(default="rejected", description="column: the worse answer, likewise")
    tokenizer: str = Field(
        description='a local folder, a name on the hub, or "run": that of each run\'s model, with its chat template'
    )
    loss_on: Literal["answers", "all"] = Field(
        default="answers", description="the tokens to learn: the assistant's, or all"
    )
    max_length: int = Field(default=1024, ge=2, le=MAX_TOKENS, description="tokens to which a chat is truncated")
    truncation_side: Literal["left", "right"] = Field(
        default="right", description="the side that is cut off; the start token stays"
    )
    pack: bool = Field(default=False, description="whether rows of max_length tokens hold several chats each")
    in_memory: bool | None = Field(
        default=None,
        description="whether tokens are kept in memory rather than read for each batch; up to 64 MiB if unset",
    )

    @model_validator(mode="after")
    def _has_no_classes(self) -> Self:
        of_classes = {"labels": self.labels, "absent": self.absent, "problem_type": self.problem}
        for name, value in of_classes.items():
            if value is not None:
                raise ValueError(f"{name}: a chat has no class: leave it out")
        return self


def chat(options: ChatOptions, prepared: PreparedFolder = NOT_KEPT) -> Dataset:
    """Return `input_ids`, `attention_mask` and `labels`, int64 [n, tokens], with -100 for tokens that are not scored.

    With `loss_on = "answers"`, chats without an answer, or whose answers are cut off, are left out and counted. Pairs
    are [n, 2, tokens], the rejected answer first, with `answer_mask` in place of labels of tokens, and `labels` of 1.
    Raises DataError, naming the row, for a chat that cannot be read.
    """
    table = read_table("file", options.file, options.split, prepared, options.separator)
    layout = layout_of(options, table)
    of_pairs = layout == "preference"
    if of_pairs and (options.pack or options.loss_on == "all"):
        name = "pack" if options.pack else "loss_on"
        raise DataError(f"{name}: {table.where} has pairs of answers, which are compared by themselves: leave it out")
    chats = chats_of(options, table, layout)
    sources = np.empty((table.examples, hashlib.sha256().digest_size), np.uint8)
    answered, differing = np.ones((2, table.examples), bool)
    # This pass refuses a row that cannot be read before any run.
    for row, each in enumerate(chats):
        sources[row] = memoryview(hashlib.sha256(each.model_dump_json().encode()).digest())
        answered[row] = options.loss_on == "all" or all(side.answers for side in each.sides)
        differing[row] = not of_pairs or each.rejected != each.turns[each.scored_from :]
    if not (used := answered & differing).any():
        what = "two answers that differ" if of_pairs else "an answer"
        raise DataError(f"{COLUMNS[layout][-1]}: no row of {table.where} has {what}: add answers")
    file = TokenFile(table, prepared, _tokens_name(options, table), options.in_memory)
    texts = RawTexts(
        chats,
        partial(_converted, options, file),
        options.max_length,
        of_chats=True,
        of_pairs=of_pairs,
        numbers=np.arange(table.examples),
        settings=f"{options.loss_on} {options.truncation_side}",
    )
    labels, tokens = torch.empty((table.examples, 0), dtype=torch.int64), (options.max_length,)
    shapes: dict[str, Shape] = {IDS: tokens, MASK: tokens, LABELS: tokens}
    if of_pairs:
        labels = torch.ones(table.examples, dtype=torch.int64)
        shapes = {**dict.fromkeys((IDS, MASK, ANSWERS), (2, *tokens)), LABELS: ()}
    raw = Dataset(
        {LABELS: labels},
        domains=table.domains(options.domain),
        sources=sources,
        groups=table.groups(options.group),
        subgroups=table.subgroups(options.subgroups),
        texts=texts,
        pack=options.pack,
        report=LoadReport(
            ignored_files=by_suffix(table.other_files),
            passed_over=table.passed_over,
            ungrouped=table.ungrouped(
                options.group, options.input, *(getattr(options, name) for name in COLUMNS[layout])
            ),
            without_group=table.without_group(options.group),
            truncation=over_in_words(texts, options.max_length) if options.tokenizer == RUN else None,
            shown=_together([_marked(side) for side in chats[int(used.argmax())].sides]),
            unanswered=np.flatnonzero(~answered).tolist(),
            alike=np.flatnonzero(answered & ~differing).tolist(),
        ),
        schema=schema_of(dict.fromkeys(shapes, labels), shapes),
    )
    prepared.clear(lambda name: name.startswith((table_name(table.digest), file.begin)))
    kept = raw.rows(torch.from_numpy(np.flatnonzero(used)))
    return kept if options.tokenizer == RUN else tokenized_here(kept, tokenizer_of("tokenizer", options.tokenizer))


def layouts_in(options: ChatOptions, table: DataTable) -> list[Layout]:
    """Return the layouts whose columns the table has."""
    return [
        layout
        for layout, names in COLUMNS.items()
        if all(table.own_name(getattr(options, name)) is not None for name in names)
    ]


def layout_of(options: ChatOptions, table: DataTable) -> Layout:
    """Return the layout that the options name, or the only one whose columns the table has. Raises DataError."""
    if options.layout is not None:
        return options.layout
    there = layouts_in(options, table)
    if len(there) == 1:
        return there[0]
    if there:
        raise DataError(f"layout: {table.where} has the columns of {' and '.join(there)}: set layout to one of them")
    raise DataError(
        f"messages: {table.where} has the columns {', '.join(table.names[:20])}, but neither messages, nor prompt "
        "and completion, nor instruction and output, nor question, choices and answer, nor chosen and rejected: name "
        "its columns by these options"
    )


def chats_of(options: ChatOptions, table: DataTable, layout: Layout) -> Cells[Chat]:
    """Return the chats of a table. Reading raises DataError, naming the row, for a chat that cannot be read."""
    names = list(COLUMNS[layout])
    more: dict[Layout, str] = {"instruction": "input", "preference": "prompt"}
    if (name := more.get(layout)) and table.own_name(getattr(options, name)) is not None:
        names.append(name)
    columns = {name: table.cells(name, getattr(options, name)) for name in names}
    return Cells(partial(_read, layout, columns, table.where), np.arange(table.examples))


def _read(layout: Layout, columns: Mapping[str, Cells[Any]], where: str, rows: NDArray[np.int64]) -> list[Chat]:
    """Return the chats of these rows. Raises DataError."""
    found = []
    for row, *values in zip(rows.tolist(), *(cells.read(rows) for cells in columns.values()), strict=True):
        try:
            found.append(_READERS[layout](*values))
        except ValueError as fault:
            raise DataError(f"{next(iter(columns))}: row {row} of {where} {fault}") from fault
    return found


def _of_messages(value: object) -> Chat:
    return _conversation(_messages(value))


def _of_prompt(prompt: object, completion: object) -> Chat:
    first, second = _listed(prompt), _listed(completion)
    if isinstance(first, list):
        if isinstance(second, str) and second.strip():
            raise ValueError("has messages as its prompt and text as its completion: make both lists, or both texts")
        before = _messages(first)
        return _conversation(before + (_messages(second) if isinstance(second, list) else ()), len(before))
    if isinstance(second, list):
        raise ValueError("has text as its prompt and messages as its completion: make both lists, or both texts")
    turns = (
        ("prompt", _text("the prompt", prompt)),
        ("completion", _text("the completion", completion, or_none=True)),
    )
    return _checked(Chat(turns=turns, scored_from=1, plain=True))


def _of_instruction(instruction: object, output: object, more: object = None) -> Chat:
    parts = [_text("the instruction", instruction), _text("the input", more, or_none=True)]
    answer = _text("the output", output, or_none=True)
    asked = (USER, "\n\n".join(part for part in parts if part.strip()))
    return _checked(Chat(turns=(asked, (ASSISTANT, answer)) if answer.strip() else (asked,)))


def _of_choices(question: object, choices: object, answer: object) -> Chat:
    asked = _listed(question)
    before = _messages(asked) if isinstance(asked, list) else ((USER, _text("the question", question)),)
    listed, offered = _offered(choices)
    # A number is a place or a letter such as "1", and a text may be an answer or its letter.
    if isinstance(answer, int) and not isinstance(answer, bool):
        found = {name for place, name in enumerate(listed) if answer == place or str(answer) == name}
    else:
        found = {name for name, text in offered.items() if answer in (name, text)}
    if len(found) != 1 or not found <= offered.keys():
        raise ValueError(f"has the right answer {str(answer)[:40]!r}: give the place (from 0), letter or text of one")
    texts, right = list(offered.values()), list(offered).index(found.pop())
    chat = _conversation((*before, (ASSISTANT, texts[right])), len(before))
    return _checked(chat.model_copy(update={"choices": tuple(texts), "right": right}))


def _of_preference(chosen: object, rejected: object, prompt: object = None) -> Chat:
    texts, asked = {"chosen": _listed(chosen), "rejected": _listed(rejected)}, _listed(prompt)
    are_whole = all(map(_is_whole, texts.values()))
    if not (are_whole or asked):
        raise ValueError(
            "has no prompt: fill it in, or make chosen and rejected lists of messages that begin with it"
        )
    sides = []
    for name, text in texts.items():
        try:
            sides.append(_conversation(_messages(text)) if are_whole else _of_prompt(asked, text))
        except ValueError as fault:
            raise ValueError(f"{fault} (column {name})") from fault
    better, worse = sides
    start = better.scored_from
    if are_whole:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(better.turns, worse.turns, strict=False))
        start = len(list(same))
        # The same conversation twice has the same last answer.
        start -= better.turns == worse.turns and start > 1
        shared = better.turns[:start]
        if not shared:
            raise ValueError("has no message with which both chosen and rejected begin: correct or remove it")
        if asked and (_messages(asked) != shared if isinstance(asked, list) else (USER, asked) not in shared):
            raise ValueError("has a prompt with which chosen and rejected do not begin: correct or remove it")
    rest = worse.turns[start:] or ((ASSISTANT, ""),)
    return _checked(better.model_copy(update={"scored_from": start, "rejected": rest}))


def _is_whole(value: object) -> bool:
    """Return True for messages that begin with a prompt, and False for those of an answer."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and first.get("role") != ASSISTANT


def _offered(value: object) -> tuple[list[str], dict[str, str]]:
    """Return the letters of a question, or its places as text, and the answers that it offers by these. Raises
    ValueError."""
    if isinstance(value, str) and len(value) <= MAX_JSON:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if isinstance(value, list):
        value = {str(place): text for place, text in enumerate(value)}
    if not isinstance(value, dict):
        raise ValueError('has no list of choices, such as ["yes", "no", "maybe"]: correct or remove it')
    # A column of objects has all letters of the table in each row.
    offered = {str(name): _text("a choice", text) for name, text in value.items() if text is not None}
    if not 2 <= len(offered) <= MAX_CHOICES:
        raise ValueError(f"has {len(offered)} choices; 2 to {MAX_CHOICES} are read: correct or remove it")
    if not all(map(str.strip, offered.values())) or len({*offered.values()}) < len(offered):
        raise ValueError("has an empty choice, or one twice: correct or remove it")
    return list(map(str, value)), offered


_READERS: dict[Layout, Callable[..., Chat]] = {
    "messages": _of_messages,
    "prompt": _of_prompt,
    "instruction": _of_instruction,
    "choice": _of_choices,
    "preference": _of_preference,
}


def _listed(value: object) -> object:
    """Return a cell, or "" for an empty one, or a list of messages that is written as JSON, as in a CSV file."""
    if isinstance(value, str) and value.lstrip()[:1] == "[" and len(value) <= MAX_JSON:
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(found, list) and found and all(isinstance(each, dict) and "role" in each for each in found):
            return found
    return "" if value is None else value


def _text(what: str, value: object, *, or_none: bool = False) -> str:
    if value is None and or_none:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"has {type(value).__name__} as {what}, not text: correct or remove the row")
    return value


def _messages(value: object) -> tuple[tuple[str, str], ...]:
    """Return the role and the content of each message. Raises ValueError."""
    if isinstance(value, str) and len(value) > MAX_JSON:
        raise ValueError(f"has {len(value):,} characters; {MAX_CHARACTERS:,} are read: shorten or divide it")
    messages = _listed(value)
    if not isinstance(messages, list):
        raise ValueError('is no list of messages, such as [{"role": "user", "content": "..."}]: correct or remove it')
    turns = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"has a message {number} that is not an object with role and content: correct it")
        more = sorted(name for name, part in message.items() if name not in ("role", "content") and part is not None)
        if more:
            raise ValueError(f"has {more[0]!r} in message {number}; only role and content are read: remove it")
        role = message.get("role")
        if role not in (SYSTEM, USER, ASSISTANT):
            raise ValueError(f"has the role {str(role)[:40]!r} in message {number}: use system, user or assistant")
        turns.append((str(role), _text(f"the content of message {number}", message.get("content"))))
    return tuple(turns)


def _conversation(turns: tuple[tuple[str, str], ...], scored_from: int = 0) -> Chat:
    """Return a conversation. Raises ValueError for roles out of order."""
    roles = [role for role, _ in turns]
    begin = int(roles[:1] == [SYSTEM])
    if len(roles) == begin:
        raise ValueError("has no messages of a user: correct or remove it")
    for number, role in enumerate(roles[begin:], begin):
        if role != (expected := USER if (number - begin) % 2 == 0 else ASSISTANT):
            raise ValueError(
                f"has the role {role} in message {number}, where {expected} is expected: after at most one system "
                "message, user and assistant take turns"
            )
    return _checked(Chat(turns=turns, scored_from=scored_from))


def _checked(chat: Chat) -> Chat:
    """Return a chat. Raises ValueError for too many characters, and for invalid ones."""
    size = sum(map(len, chat.texts))
    if size > MAX_CHARACTERS:
        raise ValueError(f"has {size:,} characters; {MAX_CHARACTERS:,} are read: shorten or divide it")
    try:
        "".join(chat.texts).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no character: correct or remove it") from None
    if any(mark in content for content in chat.texts for mark in (BEGIN, END)):
        raise ValueError("has a character for private use, U+F0000 or U+F0001: remove it")
    return chat


def _together(texts: Sequence[str]) -> str:
    """Return the text of a chat, or those of a pair."""
    return texts[0] if len(texts) == 1 else f"chosen:\n{texts[1]}\nrejected:\n{texts[0]}"


def _marked(chat: Chat) -> str:
    """Return the messages of a chat, before there are tokens, with answers between brackets."""
    texts = [f"[[{text}]]" if place in chat.answers else text for place, text in enumerate(chat.contents)]
    return _readable("\n".join(f"{role}: {text}" for (role, _), text in zip(chat.turns, texts, strict=True)))


def _tokens_name(options: ChatOptions, table: DataTable) -> str:
    """Return the beginning of the names of files with the chats of a table as tokens."""
    others = {"file", "split", "separator", "tokenizer", "in_memory", "pack", "domain", "group", "subgroups"}
    return f"chats-{digest_of([FORMAT, table.digest, options.model_dump(mode='json', exclude=others)])}"


def _converted(
    options: ChatOptions, file: TokenFile, dataset: Dataset, texts: RawTexts, tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    """Return the data set that `chat` describes from raw chats: all of a table, or some for a run's tokenizer."""
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer: {tokenizer.name_or_path} has no fast version, which chats need")
    counts, notes = TokenCounts(tokenizer, texts), dict[str, Any]()
    found = _batches(options, file, texts, tokenizer, counts, notes)
    tokens = file.tokens(texts, tokenizer, counts, found, notes)
    made, noted = file.dataset(dataset, texts, tokenizer, tokens), tokens.notes
    lost = noted["lost"]
    if len(lost) == made.examples and not texts.keeps_cut:
        raise DataError(
            f"max_length: no example of {file.table.where} has a token of an answer in its {counts.limit} tokens: "
            'set a larger max_length, or truncation_side = "left"'
        )
    rows = np.asarray(texts.numbers)[lost].tolist()
    unasked = np.asarray(texts.numbers)[noted["unasked"]].tolist()
    report = replace(made.report, cut_answers=rows, unasked=unasked, endless=noted["endless"], shown=noted["shown"])
    choices = [Choices.of(each) for each in noted["choices"]] or None
    # With every token scored, the labels do not show the answers.
    writer = tokenizer.backend_tokenizer if options.loss_on == "answers" and not texts.of_pairs else None
    made = replace(made, tokenizer=writer, choices=choices)
    kept = np.delete(np.arange(made.examples), lost)
    return replace(made.rows(torch.from_numpy(kept)) if lost and not texts.keeps_cut else made, report=report)


def _batches(
    options: ChatOptions,
    file: TokenFile,
    texts: RawTexts,
    tokenizer: PreTrainedTokenizerBase,
    counts: TokenCounts,
    notes: dict[str, Any],
) -> Iterator[TokenBatch]:
    """Yield chats as tokens, with labels. Note the places of those without a label, and of those that begin within an
    answer, the answers that questions offer, and a chat to show."""
    done = 0
    notes.update(lost=[], unasked=[], endless=0, shown=None, choices=[])
    each = 2 if texts.of_pairs else 1
    for some in _pieces(texts.first):
        rows = texts.numbers[done : done + len(some)]
        sides = [side for chat in some for side in chat.sides]
        made = _tokens(options, file, tokenizer, sides, np.repeat(rows, each))
        offered = _offered_tokens(options, file, tokenizer, some, rows)
        notes["endless"] += made.endless
        ids, labels = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
        ends = made.lengths.cumsum()
        for number, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
            place, side = divmod(number, each)
            whole = made.ids[begin:end].astype(np.int64)
            wanted = np.where(made.scored[begin:end], whole, IGNORED)
            kept = _kept(options, whole, tokenizer.bos_token_id, counts.limit)
            ids.append(whole[kept])
            labels.append(wanted[kept])
            fits = True
            if some[place].choices:
                shared, answers = next(offered)
                notes["choices"].append((some[place].right, int((kept < shared).sum()), answers))
                fits = max(map(len, answers)) < counts.limit
            if side + 1 < each:
                continue
            # The first token is predicted by none.
            cut = [not (row[1:] != IGNORED).any() for row in labels[-each:]]
            if not fits or any(cut) or (texts.of_pairs and np.array_equal(ids[-2], ids[-1])):
                notes["lost"].append(done + place)
                continue
            is_cut = len(kept) < len(whole) and (options.loss_on, options.truncation_side) == ("answers", "left")
            # The start token is never cut off.
            if is_cut and labels[-1][int(whole[0] == tokenizer.bos_token_id)] != IGNORED:
                notes["unasked"].append(done + place)
            if notes["shown"] is None:
                found = zip(ids[-each:], labels[-each:], strict=True)
                notes["shown"] = _together([_shown(tokenizer, *row) for row in found])
        done += len(some)
        every, marks = np.concatenate(ids), np.concatenate(labels)
        counts.add(every, made.lengths)
        learnt = {ANSWERS: (marks != IGNORED).astype(np.int64)} if texts.of_pairs else {LABELS: marks}
        columns = {IDS: every, MASK: np.ones_like(every), **learnt}
        yield TokenBatch(np.array(list(map(len, ids)), np.int64), columns)


def _offered_tokens(
    options: ChatOptions,
    file: TokenFile,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    rows: Sequence[int] | NDArray[np.int64],
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield, of each chat that offers answers, the number of tokens before all of them, and the tokens of each from
    there to its last scored one. Raises DataError."""
    every = [(row, chat.answered(text)) for row, chat in zip(rows, chats, strict=True) for text in chat.choices]
    ids, starts, done = list[list[int]](), list[int](), 0
    for some in _pieces(chat for _, chat in every):
        asked = options.model_copy(update={"loss_on": "answers"})
        made = _tokens(asked, file, tokenizer, some, [row for row, _ in every[done : done + len(some)]])
        done += len(some)
        for begin, end in pairwise([0, *made.lengths.cumsum().tolist()]):
            scored = np.flatnonzero(made.scored[begin:end])
            # A template may write a line break after the turn, which no training scores.
            ids.append(made.ids[begin : begin + int(scored[-1]) + 1].tolist())
            starts.append(int(scored[0]))
    place = 0
    for count in (len(chat.choices) for chat in chats if chat.choices):
        answers, place = ids[place : place + count], place + count
        # A token may stand for the end of the question and the beginning of an answer.
        alike = takewhile(lambda tokens: len({*tokens}) == 1, zip(*answers, strict=False))
        shared = min(*starts[place - count : place], len(list(alike)))
        yield shared, [tokens[shared:] for tokens in answers]


def _kept(options: ChatOptions, ids: NDArray[np.int64], start: int | None, limit: int) -> NDArray[np.int64]:
    """Return the places of the tokens that truncation keeps, int64 [tokens]."""
    places = np.arange(len(ids))
    if options.truncation_side == "right" or len(ids) <= limit:
        return places[:limit]
    first = int(ids[0] == start)
    return np.concatenate([places[:first], places[len(ids) - limit + first :]])


def _pieces(chats: Iterable[Any]) -> Iterator[list[Chat]]:
    """Yield chats that a child process converts together."""
    some, size = list[Chat](), 0
    for each in chats:
        some.append(each)
        size += sum(map(len, each.texts))
        if len(some) == AT_ONCE or size >= CHARACTERS_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _tokens(
    options: ChatOptions,
    file: TokenFile,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    rows: Sequence[int] | NDArray[np.int64],
) -> ChatTokens:
    """Return chats as tokens, which a child process makes. Raises DataError."""
    template: Any = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    if template is None and not all(each.plain for each in chats):
        raise NoChatTemplate(
            f"tokenizer: {tokenizer.name_or_path} has no chat template: add chat_template.jinja to the folder of the "
            "tokenizer, or of the model before `tessera model init`; or make prompt and completion texts"
        )
    with TemporaryDirectory(prefix="tessera-", dir=file.prepared.scratch) as folder:
        result = Path(folder) / "tokens"
        request = ChatRequest(
            tokenizer=tokenizer.backend_tokenizer.to_str(),
            template=template,
            special={name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            chats=tuple(chats),
            all_tokens=options.loss_on == "all",
            result=str(result),
        )
        try:
            Sandbox().write_tokens(request, lambda: None)
            return ChatTokens(result)
        except UnsafeConfig as fault:
            raise DataError(f"tokenizer: {fault}") from fault
        except ChatFault as fault:
            raise DataError(
                f"tokenizer: the chat template of {tokenizer.name_or_path} cannot write row {rows[fault.place]} of "
                f"{file.table.where}: {fault}"
            ) from fault


def _shown(tokenizer: PreTrainedTokenizerBase, ids: NDArray[np.int64], labels: NDArray[np.int64]) -> str:
    """Return tokens as text, with scored ones between brackets."""
    scored = labels != IGNORED
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(scored)) + 1)
    parts = [(str(tokenizer.decode(ids[run])), bool(scored[run[0]])) for run in runs]
    return _readable("".join(f"[[{part}]]" if marked else part for part, marked in parts))


def _readable(text: str) -> str:
    """Return the beginning of a text, without characters that a terminal would obey."""
    short = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in short
    )


ADAPTER = Adapter("chat", ChatOptions, chat, chat)
