"""The numbers of a results folder: each with the file and the rows that it comes from."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.measure.layer_grid import Summary, Verdict, judge, read_results, summarise
from tools.paper.folder import Folder, read_json, read_lines, read_table
from tools.paper.whole_models import largest_spread

Row = Mapping[str, str]


@dataclass(frozen=True)
class Span:
    """The least, the median and the most of some values, and how many there are."""

    least: float
    middle: float
    most: float
    count: int

    def shown(self) -> str:
        """As text."""
        return f"{self.least:.2f} / {self.middle:.2f} / {self.most:.2f} x ({self.count})"


def span(values: Sequence[float]) -> Span | None:
    """The span of the values; None if there are none."""
    return Span(min(values), median(values), max(values), len(values)) if values else None


@dataclass(frozen=True)
class Step:
    """A whole model under one schedule: the median over its turns."""

    kind: str
    tp: int
    esp: int
    schedule: str
    ran: str
    step_ms: float
    tokens_per_second: float
    exposed_communication: float | None
    resident_mib: float
    turns: int


@dataclass(frozen=True)
class Claim:
    """What the paper claims; what was measured here; what a model predicts. Never mixed."""

    what: str
    paper: str
    measured: str
    predicted: str
    rows: str


@dataclass(frozen=True)
class Figures:
    """Everything that a report shows."""

    run: Mapping[str, Any]
    verdicts: Sequence[Verdict]
    layers: Summary | None
    predicted: Sequence[Row]
    steps: Sequence[Step]
    curves: Mapping[tuple[str, int, int], Mapping[str, Sequence[float]]]
    peers: Sequence[Mapping[str, Any]]
    growth: Sequence[Row]
    growth_check: Sequence[Row]
    layer_rows: Sequence[Mapping[str, Any]]

    def speedups(self, over: str, **only: int) -> list[float]:
        """Measured, of auto over a schedule; `only` keeps layers with these sizes."""
        kept = [one for one in self.verdicts if all(one.point[name] == value for name, value in only.items())]
        return [value for one in kept if (value := one.speedup_over(over)) is not None]

    def predicted_speedups(self, source: str, over: str, by: str = "auto_ms", **only: int) -> list[float]:
        """Predicted, of auto (or another column) over a schedule."""
        return [
            float(row[f"{over}_ms"]) / float(row[by])
            for row in self.predicted
            if row["source"] == source
            and row[f"{over}_ms"]
            and all(int(row[name]) == value for name, value in only.items())
        ]

    def step_ratio(self, kind: str, tp: int, esp: int, over: str) -> float | None:
        """How many times as long as auto a whole step takes under another schedule."""
        times = {one.schedule: one.step_ms for one in self.steps if (one.kind, one.tp, one.esp) == (kind, tp, esp)}
        return times[over] / times["auto"] if {over, "auto"} <= set(times) else None

    @property
    def model_layouts(self) -> list[tuple[str, int, int]]:
        """The whole models that were timed."""
        return list(dict.fromkeys((one.kind, one.tp, one.esp) for one in self.steps))

    def growth_errors(self) -> list[float]:
        """How far the predicted communication on more ranks lies from the measured."""
        pairs = [
            (float(row["communication_predicted_ms"]), float(row["communication_measured_ms"]))
            for row in self.growth_check
        ]
        return [abs(guess / found - 1) for guess, found in pairs if found > 0]


def figures_of(folder: Folder) -> Figures:
    """Read a results folder; stages that have not run leave their part empty. Raises DataError for a damaged file."""
    layers = list(read_results(folder.layers).values())
    rows = read_lines(folder.models)
    curves: dict[tuple[str, int, int], dict[str, list[float]]] = defaultdict(dict)
    for row in rows:
        if row["purpose"] == "curve":
            curves[row["kind"], row["tp"], row["esp"]][row["schedule"]] = row["losses"]
    return Figures(
        run=read_json(folder.facts) or {},
        verdicts=[judge(result) for result in layers],
        layers=summarise(layers) if layers else None,
        predicted=read_table(folder.table("predicted")),
        steps=_steps([row for row in rows if row["purpose"] == "time"]),
        curves=curves,
        peers=[{"file": path.name, **read_json(path)} for path in folder.peers()],
        growth=read_table(folder.table("growth")),
        growth_check=read_table(folder.table("growth_check")),
        layer_rows=layers,
    )


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[Step]:
    turns: dict[tuple[str, int, int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        turns[row["kind"], row["tp"], row["esp"], row["schedule"]].append(row)
    return [
        Step(
            *place,
            ran=", ".join(sorted({row["ran"] for row in own})),
            step_ms=median(row["step_ms"] for row in own),
            tokens_per_second=median(row["tokens_per_second"] for row in own),
            exposed_communication=median(shares)
            if (shares := [row["exposed_communication"] for row in own if "exposed_communication" in row])
            else None,
            resident_mib=max(row["resident_mib"] for row in own),
            turns=len(own),
        )
        for place, own in turns.items()
    ]


def claims(found: Figures) -> list[Claim]:
    """The paper's claims beside what is known here."""

    def shown(values: Sequence[float]) -> str:
        whole = span(values)
        return "not measured" if whole is None else whole.shown()

    def ratios(over: str) -> str:
        parts = [
            f"{kind} tp {tp} esp {esp}: {value:.2f} x"
            for kind, tp, esp in found.model_layouts
            if (value := found.step_ratio(kind, tp, esp, over)) is not None
        ]
        return "; ".join(parts) or "not measured"

    def both(over: str) -> str:
        published, fitted = (found.predicted_speedups(source, over) for source in ("published", "fitted"))
        if not published:
            return "not computed"
        return f"8 x 4 RTX 2080 Ti, published constants: {shown(published)}" + (
            f"; this cluster, fitted: {shown(fitted)}" if fitted else ""
        )

    regret, layers = "not measured", found.layers
    if layers is not None:
        regret = f"mean {layers.mean_regret:.1%}, most {layers.max_regret:.1%} of {layers.shapes} layers"
    spreads = [largest_spread(list(own.values())) for own in found.curves.values()]
    return [
        Claim(
            "Speed-up of an MoE layer over the paper's model of DeepSpeed-MoE (least / median / most, layers)",
            "1.13 to 5.77 x over 1296 layers on 8 and 32 GPUs",
            shown(found.speedups("baseline")),
            both("baseline"),
            "layers.csv, predicted.csv",
        ),
        Claim(
            "The same over the order of DeepSpeed's code",
            "none known",
            shown(found.speedups("deepspeed")),
            both("deepspeed"),
            "layers.csv, predicted.csv",
        ),
        Claim(
            "A whole training step over the paper's baseline",
            "about 3 x on two models based on BERT and GPT-2",
            ratios("baseline"),
            "not computed",
            "models.csv",
        ),
        Claim(
            "A whole training step over DeepSpeed's order",
            "none known",
            ratios("deepspeed"),
            "not computed",
            "models.csv",
        ),
        Claim(
            "Loss curves of all schedules where nothing is dropped",
            "none known",
            f"at most {max(spreads):.1e} apart, relative" if spreads else "not measured",
            "equal but for rounding",
            "losses.csv",
        ),
        Claim(
            "The choice by an alpha-beta model: regret against the best measured",
            "none known",
            regret,
            "0 by construction",
            "layers.csv",
        ),
    ]
