"""Charts as SVG: a title, a description and plain shapes, which the style sheet colours.

Every chart has a table with the same values beside it, for people who cannot see it. Charts have no style attributes,
which the content security policy forbids.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from tessera.coordinator.dashboard.templating import size

WIDTH, HEIGHT = 640, 240
WIDEST_BAR = 48.0
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 30
LETTER = 8
"""Approximate width of a letter."""
NEAREST = 1e-300
"""Smallest span of values that can be drawn; a quarter of a smaller one may be zero."""
COLOURS = 8
"""Number of distinct series; further ones look alike."""


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


def lines(ident: str, title: str, series: Sequence[Series], *, bands: Sequence[Band] = (), along: str) -> Markup:
    """Draw values over rounds or versions, as `along` names them."""
    values = [value for one in series for _, value in one.ordered]
    ends = [at for one in series for at, _ in one.ordered]
    if not values:
        return Markup("")
    ticks = nice(min(values), max(values))
    exact = digits(ticks)
    labels = [f"{tick:.{exact}g}" for tick in ticks]
    across = _Scale(min(ends), max(ends), max(LEFT, 8 + LETTER * max(map(len, labels))), WIDTH - RIGHT)
    up = _Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    shapes = [_bands(bands, across), _grid(ticks, labels, across, up), _axis(min(ends), max(ends), across, along)]
    # Main series are drawn last, above the others.
    for place, one in sorted(enumerate(series), key=lambda pair: pair[1].main):
        shapes.append(_line(one, place, across, up, exact))
    last = [(one.name, *one.ordered[-1]) for one in series if one.ordered]
    values_text = "; ".join(f"{name}: {value:.{exact}g} at {at}" for name, at, value in last)
    return _picture(ident, title, f"By {along}. Last values: {values_text}.", shapes)


def bars(
    ident: str, title: str, series: Sequence[Series], limit: Series | None, *, along: str, description: str
) -> Markup:
    """Draw stacked bars and a line to compare them with."""
    places = sorted({at for one in series for at in one.points})
    if not places:
        return Markup("")
    tops = [sum(one.points.get(at, 0.0) for one in series) for at in places]
    most = max([*tops, *(limit.points.values() if limit else ())])
    ticks = nice(0.0, most)
    across = _Scale(places[0] - 0.5, places[-1] + 0.5, LEFT, WIDTH - RIGHT)
    up = _Scale(0.0, ticks[-1], HEIGHT - BOTTOM, TOP)
    width = min(WIDEST_BAR, max(1.0, 0.72 * (across(1.0) - across(0.0))))
    shapes = [_grid(ticks, [size(tick) for tick in ticks], across, up), _axis(places[0], places[-1], across, along)]
    for at in places:
        below = 0.0
        for place, one in enumerate(series):
            value = one.points.get(at, 0.0)
            if value <= 0:
                continue
            begin, end = up(below), up(below + value)
            below += value
            tooltip = f"{along} {at}, {one.name}: {size(value)}"
            shapes.append(_rect(f"c{place}", across(at) - width / 2, end, width, max(0.5, begin - end), tooltip))
    if limit:
        shapes.append(_line(limit, COLOURS - 1, across, up, css="limit"))
    return _picture(ident, title, description, shapes)


def heat(
    ident: str, title: str, rows: Mapping[str, Sequence[float]], columns: Sequence[str], description: str
) -> Markup:
    """Draw a share in [0, 1] for each row and column."""
    if not rows or not columns:
        return Markup("")
    named = min(220, 12 + max(map(len, rows)) * LETTER)
    cell = min(44.0, (WIDTH - named - RIGHT) / len(columns))
    tall = 24
    height = tall * len(rows) + 34
    shapes: list[Markup] = []
    for line, (name, shares) in enumerate(rows.items()):
        y = line * tall + 2
        shapes.append(_text(named - 8, y + tall / 2 + 4, name, "end"))
        for place, share in enumerate(shares):
            x = named + place * cell
            tooltip = f"{name}, layer {columns[place]}: {share:.0%}"
            shapes.append(_rect(f"heat h{min(9, int(share * 10))}", x, y, max(1.0, cell - 2), tall - 2, tooltip))
    step = max(1, math.ceil(22 * len(columns) / (WIDTH - named)))
    shapes += [
        _text(named + (place + 0.5) * cell - 1, height - 12, columns[place], "middle")
        for place in range(0, len(columns), step)
    ]
    return _picture(ident, title, description, shapes, height=height)


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
        shapes.append(upright.format("grid", across(tick), height - 24, _seconds(tick)))
        shapes.append(_text(across(tick), height - 8, _seconds(tick), "middle" if tick else "start", "%"))
    for line, (name, intervals) in enumerate(rows.items()):
        y = line * tall
        shapes.append(_text(0, y + 14, name, "start"))
        for one in intervals:
            x = across(one.begin)
            width = max(0.3, across(min(one.end, most)) - x)
            shapes.append(_rect(f"stretch {one.kind}", x, y + bar, width, bar, one.label, "%"))
    shapes += [upright.format("mark", across(at), height - 24, name) for name, at in marks.items() if at <= most]
    return _picture(ident, title, description, shapes, height=height, wide=True)


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


def _grid(ticks: Sequence[float], labels: Sequence[str], across: _Scale, up: _Scale) -> Markup:
    shapes = Markup("")
    for tick, label in zip(ticks, labels, strict=True):
        y = up(tick)
        shapes += Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            across.begin, WIDTH - RIGHT, y, y
        )
        shapes += _text(across.begin - 8, y + 4, label, "end")
    return shapes


def _axis(first: int, last: int, across: _Scale, along: str) -> Markup:
    ticks = sorted({first, last, *(round(t) for t in nice(first, last, 6) if first <= t <= last)})
    shapes, right = Markup(""), -math.inf
    for tick in ticks:
        x = across(tick)
        # The last label is always drawn; those that would overlap it are not.
        if tick != last and (x - right < 34 or across(last) - x < 34):
            continue
        right = x
        shapes += _text(x, HEIGHT - BOTTOM + 18, str(tick), "end" if tick == last and first != last else "middle")
    return shapes + Markup('<text class="along" x="{}" y="{}" text-anchor="end">{}</text>').format(
        across.begin - 8, HEIGHT - BOTTOM + 18, along
    )


def _bands(bands: Sequence[Band], across: _Scale) -> Markup:
    shapes = Markup("")
    seen = [band for band in bands if band.first <= across.high and band.last >= across.low]
    for place, band in enumerate(seen if len(seen) > 1 else ()):
        begin = max(across.begin, across(band.first - 0.5))
        end = min(WIDTH - RIGHT, across(band.last + 0.5))
        if end <= begin:
            continue
        shapes += Markup('<rect class="band b{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
            place % 2, begin, TOP, end - begin, HEIGHT - TOP - BOTTOM
        )
        if end - begin > 7 * len(band.name):
            shapes += Markup('<text class="stage" x="{:.1f}" y="{}">{}</text>').format(begin + 5, TOP + 13, band.name)
    return shapes


def _line(one: Series, place: int, across: _Scale, up: _Scale, exact: int = 4, css: str = "") -> Markup:
    points = one.ordered
    if not points:
        return Markup("")
    kind = css or f"line c{min(place, COLOURS - 1)}{' main' if one.main else ''}"
    path = " ".join(f"{'L' if index else 'M'}{across(at):.1f} {up(v):.1f}" for index, (at, v) in enumerate(points))
    shapes = Markup('<path class="{}" d="{}"/>').format(kind, path)
    if css or not one.main:
        return shapes
    dots = [
        f'<circle class="dot c{min(place, COLOURS - 1)}" cx="{across(at):.1f}" cy="{up(value):.1f}" r="3">'
        f"<title>{escape(f'{one.name}, {at}: {value:.{exact}g}')}</title></circle>"
        for at, value in points
    ]
    return shapes + Markup("".join(dots))  # noqa: S704 (figures, and text that is escaped)


def _rect(css: str, x: float, y: float, width: float, height: float, tooltip: str, unit: str = "") -> Markup:
    # There are hundreds of them, and Markup's own formatting takes ten times as long.
    return Markup(  # noqa: S704 (figures, a class of ours, and text that is escaped)
        f'<rect class="{css}" x="{x:.1f}{unit}" y="{y:.1f}" width="{width:.1f}{unit}" height="{height:.1f}">'
        f"<title>{escape(tooltip)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str, unit: str = "") -> Markup:
    return Markup('<text x="{:.1f}{}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, unit, y, anchor, text)


def _picture(
    ident: str, title: str, description: str, shapes: Iterable[Markup], height: int = HEIGHT, *, wide: bool = False
) -> Markup:
    """Return a picture that scales as a whole or, if `wide`, one whose shapes are in percent of the width."""
    shrinking = Markup('class="chart" viewBox="0 0 {} {}"').format(WIDTH, height)
    frame = Markup('class="chart wide" height="{}"').format(height) if wide else shrinking
    return Markup(
        '<svg {} role="img" aria-labelledby="{}-title" aria-describedby="{}-desc">'
        '<title id="{}-title">{}</title><desc id="{}-desc">{}</desc>{}</svg>'
    ).format(frame, ident, ident, ident, title, ident, description, Markup("").join(shapes))


def _seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    return f"{value / 60:.3g} min" if value >= 180 else f"{value:.3g} s"
