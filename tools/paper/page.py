"""The report as one page that needs nothing beside it, as text, and as Markdown."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

from tools.measure.layer_grid import as_lines
from tools.paper import svg
from tools.paper.figures import Figures, claims, span
from tools.paper.whole_models import largest_spread

SHEET = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 60rem;
  padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #bbb; font-size: 1.25rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
svg { width: 100%; height: auto; max-width: 44rem; } svg text { font: 12px system-ui, sans-serif; fill: #1a1a1a; }
.axis { stroke: #444; fill: none; } .grid { stroke: #ddd; fill: none; } figure { margin: 1rem 0; }
figcaption, .source { font-size: .85rem; color: #444; } a { color: #004c8c; }
@media print { body { max-width: none; font-size: 10pt; } h2 { break-after: avoid; }
  figure, table { break-inside: avoid; } }
"""
EMULATED = (
    "The cluster is emulated on one machine: real sockets between network namespaces with limited links, processes "
    "that share the machine's cores, no added latency. Nothing here is a GPU result."
)
RECONSTRUCTED = (
    "The paper's own table of 1296 layers was not available. The grid is a reconstruction: a full product with that "
    "many points whose axes follow the group's other papers."
)


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]], source: str, words: bool = False) -> str:
    """A table with its caption and the file that holds its rows."""
    cells = "".join("<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>" for row in rows)
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    kind = ' class="words"' if words else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}><caption>'
        f"{escape(caption)}</caption><thead><tr>{names}</tr></thead><tbody>{cells}</tbody></table></div>"
        f'<p class="source">Rows: {_links(source)}</p>'
    )


def _links(source: str) -> str:
    return ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in source.split(", "))


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figure(picture: str, caption: str, source: str) -> str:
    """A picture with its caption and the file that holds its points."""
    return f"<figure>{picture}<figcaption>{escape(caption)} Rows: {_links(source)}</figcaption></figure>"


def _claims(found: Figures) -> str:
    rows = [(one.what, one.paper, one.measured, one.predicted, one.rows) for one in claims(found)]
    head = ("", "the paper claims", "measured here", "predicted", "rows")
    return table(
        "Claims, measurements and predictions", head, rows, "layers.csv, models.csv, predicted.csv", words=True
    )


def _layers(found: Figures) -> Iterator[str]:
    if found.layers is None:
        yield "<p>No layer has been measured.</p>"
        return
    over = {f"over {name}": found.speedups(name) for name in ("baseline", "deepspeed")}
    histogram = svg.histogram("Measured speed-up of auto", {k: v for k, v in over.items() if v}, "times as fast")
    yield figure(histogram, "Measured: how much faster auto is than the other orders, layer by layer.", "layers.csv")
    rows = []
    for tp, esp in sorted({(one.point["tp"], one.point["esp"]) for one in found.verdicts}):
        base, deep = (span(found.speedups(name, tp=tp, esp=esp)) for name in ("baseline", "deepspeed"))
        own = [one for one in found.verdicts if (one.point["tp"], one.point["esp"]) == (tp, esp)]
        regret = sum(one.regret for one in own) / len(own)
        best = ", ".join(sorted({one.best[0] for one in own}))
        rows.append((f"{tp}, {esp}", base and base.shown(), deep and deep.shown(), f"{regret:.1%}", best))
    head = ("N_MP, N_ESP", "over baseline", "over deepspeed", "regret of auto", "best somewhere")
    yield table("Measured speed-up of auto: least / median / most (layers)", head, rows, "layers.csv")
    wins = list(found.layers.winners.items())
    yield table("Which schedule was the fastest", ("schedule", "layers"), wins, "layers.csv")
    series: dict[str, list[svg.Point]] = {}
    for result in found.layer_rows:
        for row in result["results"][:-1]:
            series.setdefault(row["schedule"], []).append((row["median_ms"], row["predicted_ms"]))
    yield figure(
        svg.scatter("Predicted against measured", series, ("measured, ms", "predicted, ms")),
        f"Predicted against measured milliseconds; the median error is {found.layers.median_error:.1%}.",
        "layers.csv",
    )


def _predicted(found: Figures) -> Iterator[str]:
    names = {"published": "8 nodes x 4 RTX 2080 Ti, published constants", "fitted": "this cluster, fitted here"}
    for source, name in names.items():
        values = found.predicted_speedups(source, "baseline")
        if not values:
            continue
        paper = found.predicted_speedups(source, "baseline", by="s1_or_s2_ms")
        series = {"auto": values, "the better of S1 and S2": paper}
        picture = svg.histogram(f"Predicted speed-up over the baseline: {name}", series, "times as fast")
        yield figure(picture, f"Predicted, {name}: {len(values)} layers.", "predicted.csv")
        layouts = sorted({(int(row["tp"]), int(row["esp"])) for row in found.predicted if row["source"] == source})
        rows = []
        for tp, esp in layouts:
            auto, better, deep = (
                span(found.predicted_speedups(source, over, by, tp=tp, esp=esp))
                for over, by in (("baseline", "auto_ms"), ("baseline", "s1_or_s2_ms"), ("deepspeed", "auto_ms"))
            )
            rows.append((f"{tp}, {esp}", *(one and one.shown() for one in (auto, better, deep))))
        head = ("N_MP, N_ESP", "auto over baseline", "S1 or S2 over baseline", "auto over deepspeed")
        yield table(f"Predicted, {name}: least / median / most (layers)", head, rows, "predicted.csv")

    yield from _predicted_variations(found)


def _predicted_variations(found: Figures) -> Iterator[str]:
    """Other numbers of ranks and capacity factors, by the published constants; where S1, S2 and the others win."""
    rows = []
    for source in dict.fromkeys(row["source"] for row in found.predicted):
        own = [row for row in found.predicted if row["source"] == source]
        auto, better = (span(found.predicted_speedups(source, "baseline", by)) for by in ("auto_ms", "s1_or_s2_ms"))
        wins = ", ".join(f"{name} {count}" for name, count in Counter(row["schedule"] for row in own).most_common())
        papers = ", ".join(f"{name} {count}" for name, count in Counter(row["s1_or_s2"] for row in own).most_common())
        rows.append((source, auto and auto.shown(), better and better.shown(), wins, papers))
    if rows:
        head = ("constants", "auto over baseline", "S1 or S2 over baseline", "fastest of all", "of S1 and S2")
        yield table("Predicted for other ranks and capacity factors", head, rows, "predicted.csv", words=True)


def _models(found: Figures) -> Iterator[str]:
    rows = []
    for one in found.steps:
        ratio = found.step_ratio(one.kind, one.tp, one.esp, one.schedule)
        exposed = None if one.exposed_communication is None else f"{one.exposed_communication:.0%}"
        place = (one.kind, f"{one.tp}, {one.esp}", one.schedule, one.ran)
        rows.append((*place, one.step_ms, ratio, one.tokens_per_second, exposed, one.resident_mib))
    head = ("model", "tp, esp", "schedule", "ran", "step ms", "times auto", "tokens/s", "waits for links", "MiB a rank")
    if rows:
        yield table("Whole training steps on real text", head, rows, "models.csv")
    for (kind, tp, esp), curves in found.curves.items():
        series = {name: [(float(step + 1), loss) for step, loss in enumerate(own)] for name, own in curves.items()}
        apart = largest_spread(list(curves.values()))
        picture = svg.lines(f"Loss of {kind}, tp {tp}, esp {esp}", series, ("iteration", "loss"))
        yield figure(
            picture, f"No expert can overflow: the curves lie {apart:.1e} apart at most, relative.", "losses.csv"
        )


def _peers(found: Figures) -> Iterator[str]:
    for one in found.peers:
        rows = [
            (row["program"], row["median_ms"], ", ".join(row["what"]) or (row["failure"] or "").split("\n")[-1])
            for row in one["results"]
        ]
        flags = one["flags"]
        title = f"{one['what']}, tp {flags['tp']}, esp {flags['esp']}: median of {flags['rounds']} rounds"
        yield table(title, ("program", "ms", "what ran"), rows, one["file"])
        ratios = [(name, values["median"]) for name, values in one["times_ours"].items()]
        if ratios:
            yield table("Times as long as ours, same round", ("program", "ratio"), ratios, one["file"])
    if found.peers:
        yield (
            "<p>On a CPU the peers use gloo's own AllGather and ReduceScatter, which are slow, and Megatron-Core runs "
            "behind a stand-in for its GPU. The ratios hold for this ground only.</p>"
        )


def _growth(found: Figures) -> Iterator[str]:
    layouts = sorted({(row["tp"], row["esp"]) for row in found.growth})
    for tp, esp in layouts:
        own = [row for row in found.growth if (row["tp"], row["esp"]) == (tp, esp)]
        series: dict[str, list[svg.Point]] = {}
        for row in own:
            ratio = float(row["baseline_ms"]) / float(row["auto_ms"])
            series.setdefault(row["kind"], []).append((float(row["ranks"]), ratio))
        picture = svg.lines(
            f"Predicted speed-up over the baseline, tp {tp}, esp {esp}", series, ("ranks", "times as fast"), log_x=True
        )
        yield figure(picture, "Predicted from the makers' figures of links, nothing measured.", "growth.csv")
    if found.growth_check:
        head = list(found.growth_check[0])
        rows = [[_number(row[name]) for name in head] for row in found.growth_check]
        yield table("A model fitted on the small cluster, on more ranks", head, rows, "growth_check.csv")
        yield f"<p>Largest error of the predicted communication: {max(found.growth_errors()):.1%}.</p>"


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _about(found: Figures) -> str:
    run: Any = found.run
    starts = run.get("starts", [])
    facts = starts[-1]["facts"] if starts else {}
    rows = [("cluster", run.get("cluster", "unknown")), ("layers' sizes divided by", run.get("scale"))]
    rows += [("models", ", ".join(f"{name} {value}" for name, value in run.get("model_sizes", {}).items()))]
    rows += list(facts.items()) + [("command", start["command"]) for start in starts[-3:]]
    return table("Where the figures come from", ("", ""), rows, "run.json", words=True)


SECTIONS: dict[str, Callable[[Figures], Iterator[str]]] = {
    "One layer, measured": _layers,
    "1296 layers, predicted": _predicted,
    "Whole models, measured": _models,
    "Beside the peers, measured": _peers,
    "More ranks, predicted": _growth,
}


def html(found: Figures) -> str:
    """The whole page."""
    emulated = f"<p><strong>{EMULATED}</strong></p>" if found.run.get("emulated", True) else ""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Parm's experiments on {escape(str(found.run.get('cluster', 'a cluster')))}</title>"
        f"<style>{SHEET}</style></head><body><main><h1>Parm's experiments on "
        f"{escape(str(found.run.get('cluster', 'a cluster')))}</h1>{emulated}<p>{RECONSTRUCTED}</p>",
        _claims(found),
    ]
    for name, section in SECTIONS.items():
        body = "".join(section(found))
        parts.append(f"<section><h2>{name}</h2>{body or '<p>This stage has not run.</p>'}</section>")
    parts.append(f"<section><h2>Machine and commands</h2>{_about(found)}</section></main></body></html>\n")
    return "".join(parts)


def text(found: Figures) -> str:
    """A summary for the terminal."""
    lines = [f"Parm's experiments on {found.run.get('cluster', 'a cluster')}"]
    for one in claims(found):
        lines += [
            one.what,
            f"  paper: {one.paper}",
            f"  measured here: {one.measured}",
            f"  predicted: {one.predicted}",
        ]
    if found.layers is not None:
        lines += list(as_lines(found.verdicts, found.layers))[-3 - len(found.layers.speedups) :]
    for peer in found.peers:
        ratios = ", ".join(f"{name} {values['median']:.2f} x" for name, values in peer["times_ours"].items())
        lines.append(f"peers, {peer['what']} ({peer['file']}): {ratios or 'no ratio'} of our time")
    if found.growth_check:
        lines.append(f"communication on more ranks: predicted within {max(found.growth_errors()):.1%}")
    return "\n".join(lines)


def markdown(found: Figures, command: str) -> str:
    """The page of docs/, from the same numbers."""
    run: Any = found.run
    starts = run.get("starts", [])
    facts = starts[-1]["facts"] if starts else {}
    lines = ["# The paper's experiments here", "", f"Made by `{command}`; not written by hand.", ""]
    if run.get("emulated", True):
        lines += [EMULATED, ""]
    lines += [RECONSTRUCTED, ""]
    if not run:
        lines += ["No results folder has been reported yet.", ""]
        return "\n".join(lines)
    lines += [f"Cluster: {run['cluster']}. {facts.get('processor', '')}, torch {facts.get('torch', '')}, commit "
              f"{facts.get('commit', '')}, {facts.get('date', '')}.", ""]  # fmt: skip
    lines += ["```bash", *(start["command"] for start in starts[-1:]), "```", ""]
    lines += ["| | the paper claims | measured here | predicted |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.what} | {one.paper} | {one.measured} | {one.predicted} |" for one in claims(found)]
    if found.steps:
        lines += [
            "",
            "| model | tp, esp | schedule | ran | step ms | times auto |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for one in found.steps:
            ratio = found.step_ratio(one.kind, one.tp, one.esp, one.schedule)
            place = f"{one.kind} | {one.tp}, {one.esp} | {one.schedule} | {one.ran}"
            lines.append(f"| {place} | {one.step_ms:.0f} | {_cell(ratio)} |")
    if found.peers:
        lines += ["", "| beside | program | ms | times ours |", "| --- | --- | --- | --- |"]
        for peer in found.peers:
            name = f"{peer['what']}, tp {peer['flags']['tp']}, esp {peer['flags']['esp']}"
            for row in peer["results"]:
                ratio = peer["times_ours"].get(row["program"], {}).get("median")
                lines.append(f"| {name} | {row['program']} | {_cell(row['median_ms'])} | {_cell(ratio)} |")
    return "\n".join([*lines, ""])
