"""Charts as SVG: a title, a description and plain shapes, which the style sheet colours.

What a chart shows is in a table beside it too, so that nobody need see it. There is no style attribute in it: the
page's policy lets none through.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 640, 240
WIDE = 1_120
"""What has a row of the page to itself."""
WIDEST_BAR = 48.0
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 30
COLOURS = 8
"""So many series are told apart; further ones look alike."""


@dataclass(frozen=True)
class Series:
    """A line: its name, and values by position."""

    name: str
    points: Mapping[int, float]
    main: bool = False

    @property
    def ordered(self) -> list[tuple[int, float]]:
        return [(at, value) for at, value in sorted(self.points.items()) if math.isfinite(value)]


@dataclass(frozen=True)
class Band:
    """A stretch of the horizontal axis, both ends included, with a name."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class _Scale:
    """From a value to a place."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        width = self.high - self.low
        share = (value - self.low) / width if width else 0.5
        return self.begin + share * (self.end - self.begin)


def lines(
    ident: str, title: str, series: Sequence[Series], *, bands: Sequence[Band] = (), unit: str = "", along: str
) -> Markup:
    """Values over rounds or versions, which `along` names."""
    values = [value for one in series for _, value in one.ordered]
    ends = [at for one in series for at, _ in one.ordered]
    if not values:
        return Markup("")
    ticks = nice(min(values), max(values))
    across = _Scale(min(ends), max(ends), LEFT, WIDTH - RIGHT)
    up = _Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    shapes = [_bands(bands, across), _grid(ticks, up, unit), _axis(min(ends), max(ends), across, along)]
    # What matters most is drawn last, above the others.
    for place, one in sorted(enumerate(series), key=lambda pair: pair[1].main):
        shapes.append(_line(one, place, across, up))
    said = "; ".join(f"{one.name}: {one.ordered[-1][1]:.4g} at {one.ordered[-1][0]}" for one in series if one.points)
    return _picture(ident, title, f"By {along}. Last values: {said}.", shapes)


def bars(ident: str, title: str, series: Sequence[Series], limit: Series | None, *, along: str, told: str) -> Markup:
    """Stacked bars, and a line that they are compared with."""
    places = sorted({at for one in series for at in one.points})
    if not places:
        return Markup("")
    tops = [sum(one.points.get(at, 0.0) for one in series) for at in places]
    most = max([*tops, *(limit.points.values() if limit else ())])
    ticks = nice(0.0, most)
    across = _Scale(places[0] - 0.5, places[-1] + 0.5, LEFT, WIDTH - RIGHT)
    up = _Scale(0.0, ticks[-1], HEIGHT - BOTTOM, TOP)
    width = min(WIDEST_BAR, max(1.0, 0.72 * (across(1.0) - across(0.0))))
    shapes = [_grid(ticks, up, "B"), _axis(places[0], places[-1], across, along)]
    for at in places:
        below = 0.0
        for place, one in enumerate(series):
            value = one.points.get(at, 0.0)
            if value <= 0:
                continue
            begin, end = up(below), up(below + value)
            below += value
            said = f"{along} {at}, {one.name}: {_bytes(value)}"
            shapes.append(_rect(f"c{place}", across(at) - width / 2, end, width, max(0.5, begin - end), said))
    if limit:
        shapes.append(_line(limit, COLOURS - 1, across, up, css="limit"))
    return _picture(ident, title, told, shapes)


def heat(ident: str, title: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str], told: str) -> Markup:
    """A share in [0, 1] for each row and column."""
    if not rows or not columns:
        return Markup("")
    named = min(220, 12 + max(map(len, rows)) * 7)
    cell = min(44.0, (WIDTH - named - RIGHT) / len(columns))
    tall = 24
    height = tall * len(rows) + 34
    shapes: list[Markup] = []
    for line, (name, shares) in enumerate(rows.items()):
        y = line * tall + 2
        shapes.append(_text(named - 8, y + tall / 2 + 4, name, "end"))
        for place, share in enumerate(shares):
            x = named + place * cell
            said = f"{name}, layer {columns[place]}: {share:.0%}"
            shapes.append(_rect(f"heat h{min(9, int(share * 10))}", x, y, max(1.0, cell - 2), tall - 2, said))
    step = max(1, math.ceil(22 * len(columns) / (WIDTH - named)))
    shapes += [
        _text(named + (place + 0.5) * cell - 1, height - 12, columns[place], "middle")
        for place in range(0, len(columns), step)
    ]
    return _picture(ident, title, told, shapes, height=height)


@dataclass(frozen=True)
class Stretch:
    """What somebody did from one instant to another, in seconds from the beginning."""

    kind: str
    begin: float
    end: float
    told: str


def timeline(
    ident: str, title: str, rows: Mapping[str, Sequence[Stretch]], most: float, marks: Mapping[str, float], told: str
) -> Markup:
    """A row each, over seconds; `marks` are instants with a name."""
    if not rows:
        return Markup("")
    named = min(220, 12 + max(map(len, rows)) * 7)
    tall = 28
    height = tall * len(rows) + 40
    across = _Scale(0.0, max(most, 1e-9), named, WIDE - RIGHT)
    shapes: list[Markup] = []
    for tick in nice(0.0, most)[:-1]:
        shapes.append(
            Markup('<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1}"/>').format(across(tick), height - 28)
        )
        shapes.append(_text(across(tick), height - 12, _seconds(tick), "middle"))
    for line, (name, stretches) in enumerate(rows.items()):
        y = line * tall + 4
        shapes.append(_text(named - 8, y + tall / 2 + 1, name, "end"))
        for one in stretches:
            x = across(one.begin)
            shapes.append(
                _rect(f"stretch {one.kind}", x, y, max(2.0, across(min(one.end, most)) - x), tall - 8, one.told)
            )
    for name, at in marks.items():
        if at <= most:
            shapes.append(
                Markup(
                    '<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1}"><title>{2}</title></line>'
                ).format(across(at), height - 28, name)
            )
    return _picture(ident, title, told, shapes, height=height, width=WIDE)


# ---------------------------------------------------------------- parts


def nice(low: float, high: float, count: int = 4) -> list[float]:
    """Round values from below `low` to above `high`, about so many."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 1.0]
    if high <= low:
        low, high = (0.0, low or 1.0) if low >= 0 else (low, 0.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if raw <= power * factor * (1 + 1e-9))
    first = math.floor(low / step + 1e-9)
    ticks = [first * step]
    while ticks[-1] < high - step * 1e-9:
        ticks.append((first + len(ticks)) * step)
    return ticks


def _grid(ticks: Sequence[float], up: _Scale, unit: str) -> Markup:
    made = Markup("")
    for tick in ticks:
        y = up(tick)
        made += Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            LEFT, WIDTH - RIGHT, y, y
        )
        made += _text(LEFT - 8, y + 4, _bytes(tick) if unit == "B" else f"{tick:.4g}", "end")
    return made


def _axis(first: int, last: int, across: _Scale, along: str) -> Markup:
    ticks = sorted({first, last, *(round(t) for t in nice(first, last, 6) if first <= t <= last)})
    made, right = Markup(""), -math.inf
    for tick in ticks:
        x = across(tick)
        # The last one stands, and what would run into it does not.
        if tick != last and (x - right < 34 or across(last) - x < 34):
            continue
        right = x
        made += _text(x, HEIGHT - BOTTOM + 18, str(tick), "end" if tick == last and first != last else "middle")
    return made + Markup('<text class="along" x="{}" y="{}" text-anchor="end">{}</text>').format(
        LEFT - 8, HEIGHT - BOTTOM + 18, along
    )


def _bands(bands: Sequence[Band], across: _Scale) -> Markup:
    made = Markup("")
    seen = [band for band in bands if band.first <= across.high and band.last >= across.low]
    for place, band in enumerate(seen if len(seen) > 1 else ()):
        begin = max(LEFT, across(band.first - 0.5))
        end = min(WIDTH - RIGHT, across(band.last + 0.5))
        if end <= begin:
            continue
        made += Markup('<rect class="band b{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
            place % 2, begin, TOP, end - begin, HEIGHT - TOP - BOTTOM
        )
        if end - begin > 7 * len(band.name):
            made += Markup('<text class="stage" x="{:.1f}" y="{}">{}</text>').format(begin + 5, TOP + 13, band.name)
    return made


def _line(one: Series, place: int, across: _Scale, up: _Scale, css: str = "") -> Markup:
    points = one.ordered
    if not points:
        return Markup("")
    kind = css or f"line c{min(place, COLOURS - 1)}{' main' if one.main else ''}"
    path = " ".join(f"{'L' if index else 'M'}{across(at):.1f} {up(v):.1f}" for index, (at, v) in enumerate(points))
    made = Markup('<path class="{}" d="{}"/>').format(kind, path)
    if css or not one.main:
        return made
    dots = [
        f'<circle class="dot c{min(place, COLOURS - 1)}" cx="{across(at):.1f}" cy="{up(value):.1f}" r="3">'
        f"<title>{escape(f'{one.name}, {at}: {value:.4g}')}</title></circle>"
        for at, value in points
    ]
    return made + Markup("".join(dots))  # noqa: S704 (figures, and text that is escaped)


def _rect(css: str, x: float, y: float, width: float, height: float, said: str) -> Markup:
    # There are hundreds of them, and Markup's own formatting takes ten times as long.
    return Markup(  # noqa: S704 (figures, a class of ours, and text that is escaped)
        f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
        f"<title>{escape(said)}</title></rect>"
    )


def _text(x: float, y: float, said: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, said)


def _picture(
    ident: str, title: str, told: str, shapes: Iterable[Markup], height: int = HEIGHT, width: int = WIDTH
) -> Markup:
    wide = " wide" if width > WIDTH else ""
    return Markup(
        '<svg class="chart{}" viewBox="0 0 {} {}" role="img" aria-labelledby="{}-title" aria-describedby="{}-desc">'
        '<title id="{}-title">{}</title><desc id="{}-desc">{}</desc>{}</svg>'
    ).format(wide, width, height, ident, ident, ident, title, ident, told, Markup("").join(shapes))


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def _seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    return f"{value / 60:.3g} min" if value >= 180 else f"{value:.3g} s"
