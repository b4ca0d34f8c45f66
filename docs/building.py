"""What `make docs` adds to the documents: README as the first page, references made from docstrings and from the
API's description, and what documents link to outside of this folder."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tessera.coordinator import openapi
from tessera.shared.cli.docs import GENERATED

ROOT = Path(__file__).parents[1]
OUTSIDE = "files/"
MESSAGES = ("runs", "versions", "tasks", "secure_sums", "admin")
LINK = re.compile(r"\]\(([^)#:\s]+)")


def http_reference() -> Iterator[str]:
    """Yield the paragraphs of a page about all operations of the API, from its description."""
    described = json.loads(openapi.document())
    yield "# HTTP API"
    yield "Under [protocol](../protocol.md) is what holds for all; the names link to [what travels](wire.md)."
    by_tag: dict[str, list[str]] = {}
    for path, operations in described["paths"].items():
        for verb, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append(_told(verb, path, operation))
    for tag, told in by_tag.items():
        yield f"## {tag.capitalize()}"
        yield from told


def _told(verb: str, path: str, operation: dict[str, Any]) -> str:
    takes = [f"| `{it['name']}` | {it['in']} | {_cell(it)} |" for it in operation.get("parameters", ())]
    if "requestBody" in operation:
        takes.append(f"| the body | {', '.join(_models(operation['requestBody']))} | |")
    table = ["| takes | as | |", "|---|---|---|", *takes] if takes else []
    gives = [f"{status} {', '.join(_models(it))}" for status, it in operation["responses"].items() if status < "3"]
    about = operation.get("description", "")
    return "\n\n".join([f"### `{verb.upper()} {path}`", about, "\n".join(table), f"Gives {'; '.join(gives)}."])


def _cell(parameter: dict[str, Any]) -> str:
    return " ".join(parameter.get("description", "").split()).replace("|", "\\|")


def _models(content: dict[str, Any]) -> list[str]:
    """Return links to the models of a body or response, or its media types if it has none."""
    names = sorted(set(re.findall(r"#/components/schemas/(?:Page_)?(\w+?)_?\"", json.dumps(content))))
    return [f"[{name}][{_module_of(name)}.{name}]" for name in names] or sorted(content.get("content", ()))


def _module_of(name: str) -> str:
    """Return the module that defines the body of a request or a response."""
    for module in MESSAGES:
        text = (ROOT / "shared" / "api" / f"{module}.py").read_text()
        if re.search(rf"^class {name}\b", text, flags=re.MULTILINE):
            return f"tessera.shared.api.{module}"
    return "tessera.shared.schema"


def _of(title: str, *modules: str) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {module}" for module in modules)]) + "\n"


REFERENCES = {
    **{f"{name}.md": document() for name, (_, document) in GENERATED.items()},
    "reference/http.md": "\n\n".join(http_reference()),
    "reference/client.md": _of(
        "Python client", "tessera.session", "tessera.shared.client.client", "tessera.shared.problems"
    ),
    "reference/wire.md": _of("What travels", *(f"tessera.shared.api.{name}" for name in MESSAGES)),
    "reference/method.md": _of(
        "What a method is made of",
        "tessera.shared.methods.base",
        "tessera.shared.model.blocks",
        "tessera.shared.model.selectors",
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not documents of this folder."""
    for place, content in REFERENCES.items():
        files.append(File.generated(config, place, content=content))
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    waiting = [file.src_uri for file in files.documentation_pages() if file.src_uri not in REFERENCES]
    while waiting:
        document = ROOT / _origin(waiting.pop())
        for target in LINK.findall(document.read_text()):
            path = (document.parent / target).resolve()
            place = _place(path.relative_to(ROOT).as_posix())
            if place.startswith(OUTSIDE) and place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(path)))
                if path.suffix == ".md":
                    waiting.append(place)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001  (theirs)
    """Return the text with each link, relative to the document, rewritten for the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(_origin(here))

    def led(link: re.Match[str]) -> str:
        place = _place(posixpath.normpath(posixpath.join(folder, link[1])))
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}"

    return markdown if here in REFERENCES else LINK.sub(led, markdown)


def _place(path: str) -> str:
    """Return the place of a repository's file in the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def _origin(place: str) -> str:
    """Return the repository's file for a place in the site."""
    if place == "index.md":
        return "README.md"
    return place.removeprefix(OUTSIDE) if place.startswith(OUTSIDE) else f"docs/{place}"
