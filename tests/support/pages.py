"""A page of the dashboard as tests read it: rows, facts, lists, links and fields, without its sentences."""

from __future__ import annotations

from collections import defaultdict
from html.parser import HTMLParser

PARTS = ("a", "button", "dd", "dt", "h1", "h2", "h3", "legend", "li", "option", "summary", "td", "textarea", "th")


class Page(HTMLParser):
    """The parts of a page, each as its text with single spaces."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        """The cells of each row of each table."""
        self.facts: dict[str, str] = {}
        """The descriptions by their terms."""
        self.links: list[str] = []
        self.fields: dict[str, str] = {}
        """The values of a form's fields, by their names."""
        self.options: defaultdict[str, list[str]] = defaultdict(list)
        """The choices of each field, by its name."""
        self.parts: defaultdict[str, list[str]] = defaultdict(list)
        """The texts of all elements of a kind, by tag; `state` has the labels of states."""
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self._select = ""
        self.feed(text)
        self.text = " ".join("".join(self._texts).split())

    def reset(self) -> None:
        super().reset()
        self._texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "tr":
            self.rows.append([])
        elif tag == "a":
            self.links.append(given.get("href", ""))
        elif tag == "select":
            self._select = given["name"]
        elif tag == "input" and "name" in given:
            self.fields[given["name"]] = given.get("value", "")
        if tag in PARTS or given.get("class", "").startswith("state "):
            self._open.append((tag, given, []))
        elif tag == "small":
            self.handle_data(" ")
        elif tag != "wbr":
            self._texts.append(" ")

    def handle_data(self, data: str) -> None:
        self._texts.append(data)
        for _, _, texts in self._open:
            texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1][0] != tag:
            return
        _, given, texts = self._open.pop()
        text = " ".join("".join(texts).split())
        self.parts["state" if tag == "span" else tag].append(text)
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append(text)
        elif tag == "dd":
            self.facts[self.parts["dt"][-1]] = text
        elif tag == "textarea":
            self.fields[given["name"]] = text
        elif tag == "option":
            self.options[self._select].append(text)
            if "selected" in given:
                self.fields[self._select] = given.get("value", text)
