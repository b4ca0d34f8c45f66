"""Charts as SVG: a title, a description and plain shapes, which the style sheet colours.

Every chart has a table with the same values beside it, for people who cannot see it. Charts have no style attributes,
which the content security policy forbids. Positions along a chart are in percent of its width, so that it fits any
screen while its text keeps its size.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from markupsafe import Markup, escape

import tessera

HEIGHT = 240
WIDEST_BAR = 8.0
TOP, BOTTOM = 14, 30
LETTER = 8
"""Approximate width of a letter."""
NARROWEST = 270
"""Width of a chart on a phone, in which the labels of an axis must have room."""
ROOM = 7
"""Letters that fit into a chart's left margin; a roomy one holds twice as many and more."""
LONGEST_NAME = 15
NEAREST = 1e-300
"""Smallest span of values that can be drawn; a quarter of a smaller one may be zero."""
WIDTH_OF_KEYS, MAX_KEY = 640, 75
STYLE = Path(tessera.__file__).parent / "coordinator" / "dashboard" / "static" / "page.css"
"""The style sheet with the colours of charts, also in a file of its own."""
COLOURS = 8
"""Number of distinct series; further ones look alike."""

Points = Mapping[int, float] | Mapping[float, float]


@dataclass(frozen=True)
class Series:
    """A line: its name, and values by position."""

    name: str
    points: Points
    main: bool = False
    best: float | None = None
    """Position of the value to mark as the best."""

    @cached_property
    def ordered(self) -> list[tuple[float, float]]:
        return [(at, value) for at, value in sorted(self.points.items()) if math.isfinite(value)]


@dataclass(frozen=True)
class Panel:
    """A chart with its title, and a table of the same values."""

    ident: str
    title: str
    picture: Markup
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    series: Sequence[Series] = ()
    note: str = ""
    shape: Literal["lines", "bars", "heat"] = "lines"


@dataclass(frozen=True)
class Band:
    """A named interval of the horizontal axis, both ends included."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class _Scale:
    """A linear map from values to coordinates."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        width = self.high - self.low
        share = (value - self.low) / width if width else 0.5
        return self.begin + share * (self.end - self.begin)


def whole(value: float) -> str:
    """Return the label of a version or a round."""
    return f"{value:.0f}"


def lines(
    ident: str,
    title: str,
    series: Sequence[Series],
    *,
    bands: Sequence[Band] = (),
    along: str,
    label: Callable[[float], str] = whole,
    names: Sequence[str] = (),
) -> Markup:
    """Draw values over rounds, versions, bytes or seconds, as `along` names them and `label` writes them, or over
    `names`, whose positions are 0, 1 and so on."""
    values = [value for one in series for _, value in one.ordered]
    places = sorted({at for one in series for at, _ in one.ordered}, reverse=True)
    if not values:
        return Markup("")
    if names:
        label = partial(_named, names)
    ticks = nice(min(values), max(values))
    exact = digits(ticks)
    labels = [f"{tick:.{exact}g}" for tick in ticks]
    across = _Scale(places[-1], places[0], 0.0, 100.0)
    up = _Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    # Main series are drawn last, above the others.
    order = sorted(enumerate(series), key=lambda pair: pair[1].main)
    shapes = [
        _bands(bands, across),
        _grid(ticks, labels, up),
        _axis(across, along, label, steps=label is whole or bool(names)),
        _curves(_path(one, f"line c{min(place, COLOURS - 1)}{' main' if one.main else ''}", across, up)
                for place, one in order),
        *(_dots(one, min(place, COLOURS - 1), across, up, lambda at: f"{along} {label(at)}", exact)
          for place, one in order),
    ]  # fmt: skip
    last = [(one.name, *one.ordered[-1]) for one in series if one.ordered]
    values_text = "; ".join(f"{name}: {value:.{exact}g} at {label(at)}" for name, at, value in last)
    description = f"By {along}. Last values: {values_text}."
    return _picture(ident, title, description, shapes, css=_margin(labels), places=map(across, places))


def spark(values: Sequence[float], said: str) -> Markup:
    """Draw values in order as a line of a table's height, without axes; `said` is its text."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    across, up = _Scale(0, len(finite) - 1, 2, 78), _Scale(min(finite), max(finite), 20, 4)
    steps = " L".join(f"{across(place):.1f} {up(value):.1f}" for place, value in enumerate(finite))
    return Markup(
        '<svg class="spark" viewBox="0 0 80 24" role="img" aria-label="{}"><path class="line c0" d="M{}"/></svg>'
    ).format(said, steps)


def bars(
    ident: str,
    title: str,
    series: Sequence[Series],
    limit: Series | None,
    *,
    along: str,
    label: Callable[[float], str],
    description: str,
) -> Markup:
    """Draw stacked bars and a line to compare them with; `label` writes their values."""
    places = sorted({at for one in series for at in one.points})
    if not places:
        return Markup("")
    of = [dict(one.points.items()) for one in series]
    tops = [sum(points.get(at, 0.0) for points in of) for at in places]
    most = max([*tops, *(limit.points.values() if limit else ())])
    ticks = nice(0.0, most)
    labels = [label(tick) for tick in ticks]
    across = _Scale(places[0] - 0.5, places[-1] + 0.5, 0.0, 100.0)
    up = _Scale(0.0, ticks[-1], HEIGHT - BOTTOM, TOP)
    width = min(WIDEST_BAR, max(0.2, 0.72 * (across(1.0) - across(0.0))))
    rects = []
    for at in places:
        below = 0.0
        for place, (one, points) in enumerate(zip(series, of, strict=True)):
            value = points.get(at, 0.0)
            if value <= 0:
                continue
            begin, end = up(below), up(below + value)
            below += value
            tooltip = escape(f"{along} {whole(at)}, {one.name}: {label(value)}")
            rects.append(_rect(f"c{place}", across(at) - width / 2, end, width, max(0.5, begin - end), tooltip))
    shapes = [_grid(ticks, labels, up), _axis(across, along, whole, steps=True), _rects(rects)]
    if limit:
        shapes.append(_curves([_path(limit, "limit", across, up)]))
    descending = map(across, reversed(places))
    return _picture(ident, title, description, shapes, css=_margin(labels), places=descending)


def heat(
    ident: str, title: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str], description: str, along: str
) -> Markup:
    """Draw a share in [0, 1] for each row and column."""
    if not rows or not columns:
        return Markup("")
    tall, cell = 24, min(9.0, 100 / len(columns))
    height = tall * len(rows) + 34
    shapes: list[Markup] = []
    escaped = [escape(column) for column in columns]
    for line, (name, shares) in enumerate(rows.items()):
        y, begin = line * tall + 2, f"{escape(name)}, {along} "
        shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
        shapes.append(_text(-8, y + tall / 2 + 4, shown, "end", ""))
        rects = []
        for place, share in enumerate(shares):
            tooltip = Markup(f"{begin}{escaped[place]}: {share:.0%}")  # noqa: S704 (escaped)
            css = f"heat h{min(9, int(share * 10))}"
            rects.append(_rect(css, place * cell, y, max(0.2, cell * 0.94), tall - 2, tooltip))
        shapes.append(_rects(rects))
    step = max(1, math.ceil((8 + LETTER * max(map(len, columns))) * 100 / NARROWEST / cell))
    shapes += [
        _text((place + 0.47) * cell, height - 12, columns[place], "middle") for place in range(0, len(columns), step)
    ]
    shapes.append(_along(along, height - 12))
    return _picture(ident, title, description, shapes, height, "plot roomy")


@dataclass(frozen=True)
class Interval:
    """A worker's activity between two instants, in seconds from the beginning."""

    kind: str
    begin: float
    end: float
    label: str


def timeline(
    ident: str,
    title: str,
    rows: Mapping[str, Sequence[Interval]],
    most: float,
    marks: Mapping[str, float],
    description: str,
) -> Markup:
    """Draw a row for each name over seconds, at full width; `marks` are named instants."""
    if not rows:
        return Markup("")
    tall, bar = 44, 20
    height = tall * len(rows) + 28
    # In percent of the width, so that text keeps its size on a phone.
    across = _Scale(0.0, max(most, 1e-9), 0.0, 100.0)
    upright = Markup('<line class="{0}" x1="{1:.1f}%" x2="{1:.1f}%" y1="0" y2="{2}"><title>{3}</title></line>')
    shapes: list[Markup] = []
    for tick in [tick for tick in nice(0.0, most) if tick <= 0.9 * most]:
        shapes.append(upright.format("grid", across(tick), height - 24, seconds(tick)))
        shapes.append(_text(across(tick), height - 8, seconds(tick), "middle" if tick else "start"))
    for line, (name, intervals) in enumerate(rows.items()):
        y = line * tall
        shapes.append(_text(0, y + 14, name, "start"))
        rects = []
        for one in intervals:
            x = across(one.begin)
            width = max(0.3, across(min(one.end, most)) - x)
            rects.append(_rect(f"stretch {one.kind}", x, y + bar, width, bar, escape(one.label)))
        shapes.append(_rects(rects))
    shapes += [upright.format("mark", across(at), height - 24, name) for name, at in marks.items() if at <= most]
    return _picture(ident, title, description, shapes, height)


# ---------------------------------------------------------------- parts


def nice(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round values from below `low` to above `high`."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high - low < NEAREST:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < NEAREST:
        high = 1.0
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if raw <= power * factor * (1 + 1e-9))
    first = math.floor(low / step + 1e-9)
    ticks = [first * step]
    while ticks[-1] < high - step * 1e-9:
        ticks.append((first + len(ticks)) * step)
    return ticks


def digits(values: Sequence[float]) -> int:
    """Return the significant digits that show a hundredth of the values' span; at least four."""
    span = max(values, default=0.0) - min(values, default=0.0)
    most = max(map(abs, values), default=0.0)
    return min(15, max(4, 2 + math.ceil(math.log10(most / span)))) if span else 4


def _margin(labels: Sequence[str]) -> str:
    return "plot roomy" if max(map(len, labels)) > ROOM else "plot"


def _grid(ticks: Sequence[float], labels: Sequence[str], up: _Scale) -> Markup:
    shapes = Markup("")
    for tick, label in zip(ticks, labels, strict=True):
        y = up(tick)
        shapes += Markup('<line class="grid" x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>').format(y)
        shapes += _text(-8, y + 4, label, "end", "")
    return shapes


def _named(names: Sequence[str], at: float) -> str:
    return names[round(at)]


def _axis(across: _Scale, along: str, label: Callable[[float], str], *, steps: bool) -> Markup:
    low, high = math.ceil(across.low), math.floor(across.high)
    ticks: list[float]
    if steps:
        ticks = sorted({low, high, *(round(tick) for tick in nice(low, high, 6) if low <= tick <= high)})
    else:
        ticks = [tick for tick in nice(across.low, across.high) if across.low <= tick <= across.high]
    shapes, right = Markup(""), -math.inf
    last = ticks[-1] if ticks else 0.0
    for tick in ticks:
        x, width = across(tick), 100 * (8 + LETTER * len(label(tick))) / NARROWEST
        # The last label is always drawn; those that would overlap it are not.
        if tick != last and (x - right < width or across(last) - x < width):
            continue
        right = x
        anchor = "start" if x < width / 2 else "end" if x > 100 - width / 2 else "middle"
        shapes += _text(x, HEIGHT - BOTTOM + 18, label(tick), anchor)
    return shapes + _along(along, HEIGHT - BOTTOM + 18)


def _along(along: str, y: float) -> Markup:
    return Markup('<text class="along" x="-8" y="{}" text-anchor="end">{}</text>').format(y, along)


def _bands(bands: Sequence[Band], across: _Scale) -> Markup:
    shapes = Markup("")
    seen = [band for band in bands if band.first <= across.high and band.last >= across.low]
    for place, band in enumerate(seen if len(seen) > 1 else ()):
        begin, end = max(0.0, across(band.first - 0.5)), min(100.0, across(band.last + 0.5))
        if end <= begin:
            continue
        # A picture within the picture cuts off a name that has no room.
        shapes += Markup(
            '<svg x="{:.2f}%" y="{}" width="{:.2f}%" height="{}"><rect class="band b{}" width="100%" height="100%"/>'
            '<text class="stage" x="5" y="13">{}</text></svg>'
        ).format(begin, TOP, end - begin, HEIGHT - TOP - BOTTOM, place % 2, band.name)
    return shapes


def _curves(paths: Iterable[Markup]) -> Markup:
    """Return paths in a picture of its own that is stretched to the width of the chart."""
    return Markup(
        '<svg class="curves" width="100%" height="{0}" viewBox="0 0 1000 {0}" preserveAspectRatio="none">{1}</svg>'
    ).format(HEIGHT, Markup("").join(paths))


def _path(one: Series, css: str, across: _Scale, up: _Scale) -> Markup:
    # Values at one position only have no line, but a round cap makes a dot of one.
    if not one.ordered:
        return Markup("")
    steps = [f"{10 * across(at):.1f} {up(value):.1f}" for at, value in one.ordered]
    return Markup('<path class="{}" d="M{}{}"/>').format(css, " L".join(steps), "h0" if len(steps) == 1 else "")


def _dots(one: Series, colour: int, across: _Scale, up: _Scale, place: Callable[[float], str], exact: int) -> Markup:
    if not one.main:
        return Markup("")
    dots = []
    for at, value in one.ordered:
        css, radius, said = ("best", 6, ", the best") if at == one.best else ("dot", 3, "")
        tooltip = escape(f"{one.name}, {place(at)}: {value:.{exact}g}{said}")
        dots.append(
            f'<circle class="{css} c{colour}" cx="{across(at):.2f}%" cy="{up(value):.1f}" r="{radius}">'
            f"<title>{tooltip}</title></circle>"
        )
    return Markup("".join(dots))  # noqa: S704 (figures, and text that is escaped)


def _rect(css: str, x: float, y: float, width: float, height: float, tooltip: Markup) -> str:
    """Return the markup of a rectangle; `_rects` joins several."""
    # There are hundreds of them, and each Markup is looked at again.
    return (
        f'<rect class="{css}" x="{x:.2f}%" y="{y:.1f}" width="{width:.2f}%" height="{height:.1f}">'
        f"<title>{tooltip}</title></rect>"
    )


def _rects(found: Iterable[str]) -> Markup:
    return Markup("".join(found))  # noqa: S704 (of `_rect`)


def _text(x: float, y: float, text: str, anchor: str, unit: str = "%") -> Markup:
    return Markup(  # noqa: S704 (figures, and text that is escaped)
        f'<text x="{x:.1f}{unit}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _picture(
    ident: str,
    title: str,
    description: str,
    shapes: Iterable[Markup],
    height: int = HEIGHT,
    css: str = "wide",
    places: Iterable[float] = (),
) -> Markup:
    """Return the picture of shapes. `places` are the positions of the rows of the chart's table, in percent."""
    at = " ".join(f"{place:.2f}" for place in places)
    return Markup(
        '<svg class="chart {}" height="{}"{} role="img" aria-labelledby="{}-title" aria-describedby="{}-desc">'
        '<title id="{}-title">{}</title><desc id="{}-desc">{}</desc>{}</svg>'
    ).format(
        css, height, Markup(' data-places="{}"').format(at) if at else "", ident, ident, ident, title, ident,
        description, Markup("").join(shapes),
    )  # fmt: skip


def seconds(value: float) -> str:
    """Return a duration as the label of an axis."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    return f"{value / 60:.3g} min" if value >= 180 else f"{value:.3g} s"


# ---------------------------------------------------------------- files


def svg_file(panel: Panel) -> str:
    """Return a chart as a file of its own: its title and legend, in the light theme's colours."""
    css = STYLE.read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--[\w-]+): light-dark\(([^,]+),", css))
    chart = css[css.index("/* charts */") : css.index("/* forms */")]
    style = re.sub(r"var\((--[\w-]+)\)", lambda found: colours.get(found.group(1), "none"), chart)
    found = re.search(r' height="(\d+)"', panel.picture)
    below = 70 + int(found[1] if found else HEIGHT)
    height = below + 20 * max(1, math.ceil(len(panel.series) / _keys_a_line(panel)))
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" width="820" height="{0}"><style>{1}</style>'
        '<rect width="820" height="{0}" fill="#fff"/><text x="136" y="30" class="heading">{2}</text>'
        '<svg x="136" y="44" width="660" overflow="visible">{3}</svg>'
        '<svg x="136" y="{4}" class="chart">{5}</svg></svg>'
    ).format(height, Markup(style), panel.title, panel.picture, below, _legend(panel))  # noqa: S704 (our own style sheet)


def _keys_a_line(panel: Panel) -> int:
    """Return the number of names that fit beside each other: names of combinations differ in their last letters."""
    longest = max((len(one.name[:MAX_KEY]) for one in panel.series), default=0)
    return max(1, min(4, WIDTH_OF_KEYS // (34 + LETTER * longest)))


def _legend(panel: Panel) -> Markup:
    """Return the marks of a chart's series with their names, or the scale of its shares."""
    if panel.shape == "heat":
        steps = (
            Markup('<rect class="heat h{}" x="{}" y="-6" width="30" height="12"/>').format(n, 30 * n)
            for n in range(10)
        )
        return Markup('<text x="-8" y="4" text-anchor="end">0 %</text>{}<text x="308" y="4">100 %</text>').format(
            Markup("").join(steps)
        )
    columns = _keys_a_line(panel)
    mark = Markup('<rect class="c{}" width="12" height="10" y="-5"/>')
    if panel.shape == "lines":
        mark = Markup('<path class="line c{}" d="M0 0H22"/>')
    return Markup("").join(
        Markup('<svg class="chart" x="{}" y="{}">{}<text x="26" y="4">{}</text></svg>').format(
            place % columns * (WIDTH_OF_KEYS // columns),
            place // columns * 20,
            mark.format(min(place, COLOURS - 1)),
            one.name[:MAX_KEY],
        )
        for place, one in enumerate(panel.series)
    )
