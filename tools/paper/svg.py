"""Pictures as SVG text to stand inside a page: titled and described for who cannot see them, no scripts, no files."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 44
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#555555", "#000000")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 4", "12 4", "6 2 2 2")
Point = tuple[float, float]


def _frame(title: str, description: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, words: str, anchor: str = "middle", turn: bool = False) -> str:
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(words)}</text>'


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    if is_log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        fine = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        inside = [value for value in fine if low <= value <= high]
        return inside if len(inside) <= 8 else [value for value in inside if f"{value:.0e}"[0] == "1"]
    step = 10 ** math.floor(math.log10((high - low) or 1))
    step = next(width for width in (step / 5, step / 2, step, 2 * step) if (high - low) / width <= 8)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


class Axes:
    """Two axes with their ticks; `x` and `y` give places in the picture."""

    def __init__(self, x: Point, y: Point, names: tuple[str, str], logs: tuple[bool, bool] = (False, False)) -> None:
        self._x = self._scale(x, LEFT, WIDTH - RIGHT, logs[0])
        self._y = self._scale(y, HEIGHT - BOTTOM, TOP, logs[1])
        self.lines = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>']
        for value in _ticks(*x, logs[0]):
            self.lines.append(_text(self.x(value), HEIGHT - BOTTOM + 16, f"{value:g}"))
        for value in _ticks(*y, logs[1]):
            place = self.y(value)
            self.lines.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>')
            self.lines.append(_text(LEFT - 6, place + 4, f"{value:g}", "end"))
        self.lines.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, names[0]))
        self.lines.append(_text(14, (TOP + HEIGHT - BOTTOM) / 2, names[1], turn=True))

    @staticmethod
    def _scale(ends: Point, first: float, last: float, is_log: bool) -> Callable[[float], float]:
        low, high = (math.log(end) for end in ends) if is_log else ends
        span = (high - low) or 1.0
        return lambda value: first + ((math.log(value) if is_log else value) - low) / span * (last - first)

    def x(self, value: float) -> float:
        """Across."""
        return self._x(value)

    def y(self, value: float) -> float:
        """Down."""
        return self._y(value)


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for place, name in enumerate(names):
        y = TOP + 14 + 16 * place
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        parts.append(
            f'<path d="M{WIDTH - 172} {y - 4}h26" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
        )
        parts.append(_text(WIDTH - 140, y, name, "start"))
    return parts


def histogram(title: str, series: Mapping[str, Sequence[float]], name: str, bins: int = 24) -> str:
    """How often each value occurs; series side by side in each bin."""
    every = [value for values in series.values() for value in values]
    low, high = min(every), max(every)
    width = (high - low) / bins or 1.0
    counts = {
        label: [
            sum(low + width * place <= value < low + width * (place + 1) for value in values) for place in range(bins)
        ]
        for label, values in series.items()
    }
    for label, values in series.items():
        counts[label][-1] += sum(value == low + width * bins for value in values)
    axes = Axes((low, low + width * bins), (0, max(max(own) for own in counts.values()) * 1.05), (name, "layers"))
    bars = []
    for place, (label, own) in enumerate(counts.items()):
        for number, count in enumerate(own):
            left = axes.x(low + width * (number + place / len(counts)))
            wide = (axes.x(low + width) - axes.x(low)) / len(counts) - 1
            top = axes.y(count)
            if count:
                bars.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(wide, 1):.1f}" '
                    f'height="{HEIGHT - BOTTOM - top:.1f}" fill="{COLOURS[place]}"><title>{escape(label)}: {count}'
                    "</title></rect>"
                )
    described = "; ".join(
        f"{label}: {len(values)} values from {min(values):.2f} to {max(values):.2f}"
        for label, values in series.items()
        if values
    )
    return _frame(title, described, [*axes.lines, *bars, *_legend(list(series))])


def scatter(title: str, series: Mapping[str, Sequence[Point]], names: tuple[str, str]) -> str:
    """Points on logarithmic axes of equal range, with the line where both are equal."""
    ends = [value for points in series.values() for point in points for value in point]
    span = min(ends) * 0.9, max(ends) * 1.1
    axes = Axes(span, span, names, (True, True))
    ends_of_line = "L".join(f"{axes.x(end):.1f} {axes.y(end):.1f}" for end in span)
    line = f'<path class="axis" d="M{ends_of_line}"/>'
    dots = [
        f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.5" fill="{_colour(place)}" fill-opacity="0.7"/>'
        for place, points in enumerate(series.values())
        for x, y in points
    ]
    described = f"{sum(map(len, series.values()))} points, {names[1]} over {names[0]}"
    return _frame(title, described, [*axes.lines, line, *dots, *_legend(list(series))])


def lines(title: str, series: Mapping[str, Sequence[Point]], names: tuple[str, str], log_x: bool = False) -> str:
    """Curves, told apart by colour and dashes."""
    x = [point[0] for points in series.values() for point in points]
    y = [point[1] for points in series.values() for point in points]
    low, high = min(y), max(y)
    margin = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    axes = Axes((min(x), max(x)), (low - margin, high + margin), names, (log_x, False))
    curves = []
    for place, points in enumerate(series.values()):
        path = "L".join(f"{axes.x(a):.1f} {axes.y(b):.1f}" for a, b in points)
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        curves.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
    described = "; ".join(
        f"{name}: from {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in series.items() if points
    )
    return _frame(title, described, [*axes.lines, *curves, *_legend(list(series))])
