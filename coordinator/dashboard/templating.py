"""Templates and number formats of the dashboard."""

import hashlib
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec

from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from tessera.coordinator.api.errors import headers_of
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import FORM_TOKEN, Visitor, query_of, theme_of
from tessera.coordinator.db.views import instant
from tessera.shared.metrics.comparison import setting_text
from tessera.shared.problems import Problem
from tessera.shared.sanitize import fit_to_show
from tessera.shared.version import VERSION, compared

STATIC = Path(__file__).parent / "static"

PART = "part"
"""Query parameter of a request for the changing part of a page only."""

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
NOTHING = "\u2013"
"""A dash in place of a missing number."""
SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))

BARE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>%s · Tessera</title><link rel="stylesheet" href="%s"></head>
<body><main id="main"><section class="card narrow"><h1>%s</h1><p class="wrong">%s</p><p class="remedy">%s</p>
<p><a href="%s">More about it</a> · <a href="%s">To the overview</a></p></section></main></body></html>
"""

P = ParamSpec("P")


@cache
def environment() -> Environment:
    jinja = Environment(
        loader=PackageLoader("tessera.coordinator.dashboard"),
        # Text from workers and people is never markup.
        autoescape=True,
        # Nor does it contain characters that are invisible or change the order of others.
        finalize=fit_to_show,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: tuple[Callable[..., Any], ...] = (size, span, number, percent, clock, ago)
    words: tuple[Callable[..., Any], ...] = (plural, short, first_up, breakable, metric_name, with_code, setting_text)
    jinja.filters.update({each.__name__: each for each in (*filters, *words, compared)})
    jinja.globals.update(version=VERSION, prefix=PREFIX, form_token_field=FORM_TOKEN, asset=asset)
    return jinja


def render(request: Request, template: str, who: Visitor | None, *, status: int = 200, **shown: Any) -> HTMLResponse:
    """Return a page, or only its changing part."""
    page = environment().get_template(template)
    text = page.render(
        frame="part.html" if PART in request.query_params else "base.html",
        path=request.scope["path"],
        query=query_of(request),
        theme=theme_of(request),
        who=who,
        # Without a visitor it may be the database that failed.
        now=instant(request.app.state.services.database.now()) if who else datetime.now(UTC),
        **shown,
    )
    return HTMLResponse(text, status_code=status)


def show_problem(request: Request, problem: Problem) -> Response:
    """Return a problem as a page; without a session as a bare one, since many would hold up the event loop."""
    document = problem.document()
    if getattr(request.state, "signed", False):
        # Without the menu if it is the database that failed.
        who = getattr(request.state, "visitor", None) if problem.status < 500 else None
        response = render(request, "problem.html", who, status=problem.status, problem=document)
    else:
        said = (document.title, asset("page.css"), document.title, document.detail, document.remedy, document.type)
        response = HTMLResponse(BARE % tuple(map(escape, (*said, f"{PREFIX}/"))), problem.status)
    response.headers.update(headers_of(problem))
    return response


@cache
def asset(name: str) -> str:
    """Return the path of a static file, which changes with its content so that browsers may cache it."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"{PREFIX}/static/{name}?v={digest}"


# ---------------------------------------------------------------- figures


def _within_range(written: Callable[P, str]) -> Callable[P, str]:
    """Write a dash for a value beyond what a float or a date can hold: a site may report any."""

    @wraps(written)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return written(*args, **kwargs)
        # ValueError: a year that no date has.
        except (OverflowError, ValueError):
            return NOTHING

    return guarded


@_within_range
def size(count: float | None) -> str:
    """Return a number of bytes with its unit, three digits."""
    if count is None:
        return NOTHING
    value = float(count)
    for unit in UNITS:
        if abs(value) < 999.5 or unit == UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.5 else f"{value:.3g} {unit}"


@_within_range
def span(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None:
        return NOTHING
    left = max(0, round(seconds))
    if left == 0:
        return "0 s" if seconds == 0 else f"{seconds:.1f} s"
    parts: list[str] = []
    for length, unit in SPANS:
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
        if len(parts) == 2:
            break
    return " ".join(part for part in parts if part)


@_within_range
def number(value: float | None, digits: int = 4) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    if share is None:
        return NOTHING
    return f"{share:.0%}" if abs(share) >= 0.1 or share == 0 else f"{share:.1%}"


@_within_range
def clock(at: datetime | None) -> str:
    return NOTHING if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(count: int, one: str) -> str:
    return f"{number(count)} {one}{'' if count == 1 else 's'}"


def first_up(text: str) -> str:
    return text[:1].upper() + text[1:]


def metric_name(name: str) -> str:
    """Return a metric's name for people."""
    return first_up(name.replace("_f1", " F1").replace("_", " "))


def short(text: str, most: int = 12) -> str:
    """Return the beginning of an id or a digest."""
    plain = text.removeprefix("sha256:")
    return plain if len(plain) <= most else f"{plain[:most]}…"


def breakable(name: str) -> Markup:
    """Return a name that may be broken after "/", "." and "_", and so nowhere else. A browser breaks after "-"."""
    return Markup(re.sub(r"([/._])", r"\1<wbr>", str(escape(fit_to_show(name)))))  # noqa: S704 (escaped)


def with_code(text: str) -> Markup:
    """Return a text whose parts in backquotes are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(fit_to_show(text)))))  # noqa: S704 (escaped)


@pass_context
def ago(context: Context, at: datetime | None) -> str:
    if at is None:
        return "never"
    passed = (context["now"] - at).total_seconds()
    return next((f"{int(passed // length)} {unit} ago" for length, unit in SPANS if passed >= length), "just now")
