"""Two results folders side by side."""

from collections.abc import Iterator, Sequence
from statistics import median

from tools.paper.figures import Figures

Named = dict[str, float]


def headlines(found: Figures) -> Named:
    """The numbers that two runs are compared by."""
    values: Named = {}
    for over in ("baseline", "deepspeed"):
        speedups = found.speedups(over)
        if speedups:
            values[f"layers: auto over {over}, median"] = median(speedups)
    if found.layers is not None:
        values["layers: mean regret of auto"] = found.layers.mean_regret
        values["layers: median error of predictions"] = found.layers.median_error
    for one in found.steps:
        values[f"{one.kind} tp {one.tp} esp {one.esp}, {one.schedule}: step ms"] = one.step_ms
    for peer in found.peers:
        for name, ratio in peer["times_ours"].items():
            values[f"{peer['file']}: {name} / ours"] = ratio["median"]
    return values


def comparison(first: Figures, second: Figures, names: Sequence[str]) -> Iterator[str]:
    """A table of what both have, then the layers that both measured, then what only one has."""
    yield f"A: {names[0]} ({first.run.get('cluster')})"
    yield f"B: {names[1]} ({second.run.get('cluster')})"
    one, other = headlines(first), headlines(second)
    yield f"{'':60} {'A':>10} {'B':>10} {'B / A':>8}"
    for name in one:
        if name in other:
            ratio = other[name] / one[name] if one[name] else float("nan")
            yield f"{name:60} {one[name]:10.4g} {other[name]:10.4g} {ratio:8.3f}"
    times = {verdict.key: verdict.chosen_ms for verdict in second.verdicts}
    shared = [times[verdict.key] / verdict.chosen_ms for verdict in first.verdicts if verdict.key in times]
    if shared:
        least, middle, most = min(shared), median(shared), max(shared)
        yield f"{len(shared)} layers in both: B / A of auto {least:.3f} least, {middle:.3f} median, {most:.3f} most"
    for letter, own, against in (("A", one, other), ("B", other, one)):
        missing = [name for name in own if name not in against]
        if missing:
            yield f"only in {letter}: {', '.join(missing)}"
