"""Findings about the files of a data set, and what people at its site are warned of."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tessera.worker.data.groups import RepeatedName

MAX_UNKNOWN = 0.2
"""Share of unknown tokens above which a tokenizer probably does not fit the texts."""
MAX_REASONS = 3
"""Number of images that a warning describes."""
MAX_ROWS = 8
"""Number of rows that a warning names."""
MAX_PIXEL = 32
"""Largest value of images above which they are probably bytes; scaled and normalised ones are below 10."""
MAX_GROUP_BYTES = 64 << 20
"""Size of row groups from which on reading images one by one is slow."""


def counted(by_name: Mapping[str, int]) -> str:
    """Return the counts, such as `30 .dcm, 2 .txt`, largest first, and at most eight of them."""
    largest = sorted(by_name.items(), key=lambda item: (-item[1], item[0]))[:8]
    return ", ".join(f"{number} {name}" for name, number in largest) + ", ..." * (len(by_name) > len(largest))


def by_suffix(files: Iterable[Path]) -> Counter[str]:
    return Counter(file.suffix.lower() or "without suffix" for file in files)


def empty_texts(texts: Iterable[object]) -> int:
    """Return the number of texts that have no character but spaces."""
    return sum(isinstance(text, str) and not text.strip() for text in texts)


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _rows(rows: Sequence[int]) -> str:
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MAX_ROWS]))}" + ", ..." * (len(rows) > MAX_ROWS)


def _first(names: Sequence[str]) -> str:
    return "; ".join(names[:MAX_REASONS]) + "; ..." * (len(names) > MAX_REASONS)


@dataclass(frozen=True)
class Truncation:
    """Texts that are longer than a model or the settings take, of which the end is cut off."""

    texts: int
    """The number of texts, of which some are `cut`."""
    cut: int
    longest: int
    limit: int
    """The most tokens that a text keeps."""
    lost: float = 0.0
    """The share of all tokens that is cut off."""
    most: int | None = None
    """The most tokens that the tokenizer or the model takes; None if texts were counted in words, before there are
    tokens, of which each word has at least one."""

    def __str__(self) -> str:
        return f"{self.cut} of {self.texts} at {self.limit} tokens"

    def warning(self) -> tuple[str, str]:
        """Return a warning about cut texts, with the remedy."""
        if self.most is None:
            found = f"{self.cut} of {self.texts} texts have more words than max_length, {self.limit}, takes tokens"
            return f"{found}; the longest has {self.longest}", "Their ends are cut off: set a larger max_length."
        found = f"{self.cut} of {self.texts} texts are longer than {self.limit} tokens, the longest {self.longest}"
        remedy = (
            f"Set max_length = {min(self.longest, self.most)} if memory allows, or divide these texts."
            if self.limit < self.most
            else "Divide these texts: the tokenizer or its model takes no more."
        )
        return f"{found}: {self.lost:.1%} of all tokens are cut off", remedy


@dataclass(frozen=True)
class OptedOut:
    """The effect of a site's opt-out list on a data set."""

    listed: int
    """The number of groups in the list. Some are `found` in the data set."""
    found: int
    examples: int
    """The number of examples that are left out."""


@dataclass(frozen=True)
class LoadReport:
    """Findings about the files of a whole data set, for people at its site. They are never sent."""

    unknown_tokens: float | None = None
    """The share of the texts' tokens that the tokenizer does not know; None without texts or such a token."""
    ignored_files: Mapping[str, int] = field(default_factory=dict)
    """The number of files in a folder of images or of tables that are neither, by suffix."""
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """The number of files and folders that systems and programs leave beside data, by name."""
    without_row: Sequence[str] = ()
    """The images that lie beside those of a table and have no row in it."""
    copies: int = 0
    """The number of images with the same bytes as an earlier one."""
    contradictions: Sequence[str] = ()
    """The names and the labels of two images with the same bytes and different labels."""
    unreadable: Sequence[str] = ()
    """The fault of each image that is left out because it cannot be read."""
    partly_read: int = 0
    """The number of images with further pages or frames, which are not read."""
    group_bytes: int = 0
    """The size of the largest row group of images in a Parquet file, all of which is read for each image."""
    unlabelled: int = 0
    """The number of examples with none of several possible labels."""
    empty_texts: int = 0
    """The number of texts without a character but spaces."""
    unusable: Sequence[str] = ()
    """Tensors with values from which nothing can be learnt."""
    largest_pixel: float = 0
    """The largest absolute value of prepared images."""
    relabelled: int = 0
    """The number of examples that are there again with another class."""
    ungrouped: Sequence[RepeatedName] = ()
    """Columns and names that are probably one person's in several examples, without a `group`."""
    without_group: int = 0
    """The number of examples whose group is missing, of a data set with a `group`."""
    opted_out: OptedOut | None = None
    """The examples that the site's opt-out list leaves out; None without a list."""
    truncation: Truncation | None = None
    """The texts that are cut off; None without texts, or before it is known."""
    no_end: bool = False
    """True if a language model's texts have no token at their end, since the tokenizer has none."""
    unanswered: Sequence[int] = ()
    """The rows of chats that are left out because they have no answer."""
    alike: Sequence[int] = ()
    """The rows that are left out because the chosen answer is the rejected one."""
    cut_answers: Sequence[int] = ()
    """The rows of chats that are left out because no token of their answers is within the most tokens."""
    unasked: Sequence[int] = ()
    """The rows of chats that begin within an answer, because truncation has cut off its question."""
    endless: int = 0
    """The number of chats with an answer after which the chat template ends no turn."""
    shown: str | None = None
    """A chat as the model reads it, with the scored tokens marked; None before there are tokens."""
    combined: Sequence[str] = ()
    """Names of classes that are probably several classes each."""

    def warnings(self, *, held_out: bool = False) -> Iterator[tuple[str, str]]:
        """Yield the probable faults, each with its remedy. With `held_out`, examples are held out."""
        if held_out:
            yield from self._on_both_sides()
        if self.opted_out and self.opted_out.listed and not self.opted_out.found:
            yield (
                f"none of the {self.opted_out.listed} lines of opt_out is a value of `group` here",
                "Write each as it stands in that column, with its zeros and its case.",
            )
        if (self.unknown_tokens or 0) > MAX_UNKNOWN:
            yield (
                f"the tokenizer does not know {self.unknown_tokens:.0%} of the tokens",
                "Use the tokenizer that the model was trained with, for texts in this language.",
            )
        if count := self.unlabelled:
            yield (
                f"{count} example{'s have' if count > 1 else ' has'} no label",
                "The model learns that none applies; remove examples that were never labelled.",
            )
        if self.truncation and self.truncation.cut:
            yield self.truncation.warning()
        if self.no_end:
            yield (
                "the tokenizer has no end-of-text token, so that the model does not learn where a text ends",
                "Set its eos_token, to a token that it has.",
            )
        if count := self.empty_texts:
            yield (
                f"{_several(count, 'empty text')} among the examples",
                "Remove these rows, or fill them in: the worker does not leave them out.",
            )
        yield from self._of_chats()
        yield from self._of_values()
        if count := sum(self.ignored_files.values()):
            yield (
                f"{_several(count, 'file')} ignored: {counted(self.ignored_files)}",
                "Convert them to a format that is read (dicom = true reads DICOM, too), or move them elsewhere.",
            )
        if count := sum(self.passed_over.values()):
            what = "files or folders" if count > 1 else "file or folder"
            yield (
                f"{count} {what} that systems or programs leave passed over: {counted(self.passed_over)}",
                "Nothing is to do, unless one contains examples: then rename it.",
            )
        yield from self._about_images()

    def sentences(self, *, held_out: bool = False) -> list[str]:
        """Return the same warnings, each with its remedy in one text."""
        return [f"{detail}. {remedy}" for detail, remedy in self.warnings(held_out=held_out)]

    def _about_images(self) -> Iterator[tuple[str, str]]:
        if count := len(self.without_row):
            yield (
                f"{_several(count, 'image')} beside the table's without a row: {_first(self.without_row)}",
                "Add a row for each that should be an example.",
            )
        if count := self.copies:
            yield (
                f"{_several(count, 'image')} with the same content as an earlier one",
                "Remove the copies, unless they should count several times.",
            )
        if count := len(self.contradictions):
            yield (
                f"{_several(count, 'image')} twice with different labels: {_first(self.contradictions)}",
                "Correct the labels, or remove these images.",
            )
        if count := len(self.unreadable):
            first = " ".join(f"{reason}." for reason in self.unreadable[:MAX_REASONS])
            yield f"{count} unreadable image{'s' * (count > 1)} left out. {first}", "Replace or remove them."
        if count := self.partly_read:
            yield (
                f"{_several(count, 'image')} with several pages or frames, of which only the first is read",
                "Save the others as files of their own, if they should be examples.",
            )
        if self.group_bytes > MAX_GROUP_BYTES:
            yield (
                f"each image is read with a row group of up to {self.group_bytes >> 20} MiB",
                "Write the Parquet files with smaller ones (row_group_size=100), or save them by `datasets`.",
            )

    def _of_chats(self) -> Iterator[tuple[str, str]]:
        if rows := self.unanswered:
            yield (
                f"{_several(len(rows), 'example')} without an answer left out: {_rows(rows)}",
                "Fill in the answers, or remove these rows.",
            )
        if rows := self.alike:
            yield (
                f"{_several(len(rows), 'example')} with the same answer twice left out: {_rows(rows)}",
                "Correct one of the two, or remove these rows.",
            )
        if rows := self.cut_answers:
            yield (
                f"{_several(len(rows), 'example')} left out whose answers are cut off: {_rows(rows)}",
                'Set a larger max_length, or truncation_side = "left", which keeps the end.',
            )
        if rows := self.unasked:
            yield (
                f"of {_several(len(rows), 'example')} the whole question is cut off: {_rows(rows)}",
                'Set a larger max_length, or truncation_side = "right", which keeps the question.',
            )
        if count := self.endless:
            yield (
                f"{_several(count, 'example')} with an answer after which no token ends the turn",
                "Have the chat template write a special token after each answer, or set the tokenizer's eos_token.",
            )

    def _of_values(self) -> Iterator[tuple[str, str]]:
        for detail in self.unusable:
            yield detail, "Correct them, or remove these examples: training fails on them, or learns nothing."
        if self.largest_pixel > MAX_PIXEL:
            yield (
                f"pixel_values go up to {self.largest_pixel:g}, as if they had not been scaled",
                "Scale them as in the model's training, to values about 0.",
            )
        if count := self.relabelled:
            yield (
                f"{count} example{'s are' if count > 1 else ' is'} there again with another class",
                "Correct the class, or remove one of them: a model learns both.",
            )
        if self.combined:
            yield (
                f"{', '.join(map(repr, self.combined[:MAX_REASONS]))} may be several classes, and counts as one more",
                'If an example has several labels, set problem_type = "multi_label"; keep names that are classes.',
            )

    def _on_both_sides(self) -> Iterator[tuple[str, str]]:
        for what, distinct, examples, remedy in self.ungrouped:
            found = f"{what} has {distinct} values in {examples} examples, and no group is set"
            yield f"{found}: if it is the patient, one patient's examples are trained on and held out", remedy
        if count := self.without_group:
            yield (
                f"{count} example{'s have' if count > 1 else ' has'} no group: each is held out by itself",
                "If several are of one patient, fill in the groups.",
            )
