"""A grid of MoE layers: the file that lists it, a result for each of its shapes, and what all of them show together."""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.moe.cost import LayerShape


@dataclass(frozen=True)
class GridPoint:
    """One layer: the paper's N_MP, N_ESP, f, B, L, M, H, E and k. num_experts 0: one for each rank of ep."""

    tp: int
    esp: int
    factor: float
    batch: int
    seq: int
    hidden: int
    ffn: int
    num_experts: int = 8
    topk: int = 2

    @property
    def key(self) -> str:
        """Its name in result files."""
        return "-".join(f"{field.name}{getattr(self, field.name):g}" for field in fields(self))

    def shape(self, world: int, num_nodes: int, bytes_per_element: int = 4) -> LayerShape:
        """The layer on `world` ranks, whose groups of ep_esp lie on `num_nodes` nodes. Raises ConfigError."""
        if world % self.tp or world % self.esp:
            raise ConfigError(f"tp {self.tp} and esp {self.esp} must divide the {world} ranks")
        ep = world // self.esp
        factor = self.factor if self.factor > 0 else None
        shape = LayerShape(
            num_tokens=self.batch * self.seq,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            num_experts=self.num_experts or ep,
            topk=min(self.topk, self.num_experts or ep),
            capacity_factor=factor,
            min_capacity=1,
            has_slots=factor is not None,
            pads=False,
            matrices=2,
            bytes_per_element=bytes_per_element,
            tp=self.tp,
            ep=ep,
            esp=self.esp,
            num_nodes=num_nodes,
        )
        shape.check()
        return shape


# 48 layers for 8 ranks: every pair of tp and esp that shares something, two factors, four sizes
STANDARD_GRID = tuple(
    GridPoint(tp, esp, factor, 1, seq, hidden, 2 * hidden)
    for (tp, esp), factor, (seq, hidden) in product(
        ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)),
        (1.25, 2.0),
        ((128, 128), (256, 256), (512, 256), (512, 512)),
    )
)


def read_grid(path: Path) -> list[GridPoint]:
    """The points of a CSV file with a line of names. Raises DataError."""
    kinds = {field.name: float if field.name == "factor" else int for field in fields(GridPoint)}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        values: list[dict[str, Any]] = [{name: kinds[name](value) for name, value in row.items()} for row in rows]
        points = [GridPoint(**one) for one in values]
    except (OSError, ValueError, TypeError, KeyError) as error:
        names = ",".join(kinds)
        raise DataError(
            f"{path} is no list of layers ({type(error).__name__}: {error}); its first line is {names}"
        ) from None
    if not points:
        raise DataError(f"{path} lists no layer")
    return points


def write_grid(path: Path, points: Iterable[GridPoint]) -> None:
    """A file that `read_grid` reads."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(GridPoint)])
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The results of a JSON lines file by the key of their point; a line that a killed run tore is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            found[str(row["key"])] = row
        except (ValueError, KeyError, TypeError):
            continue
    return found


@dataclass(frozen=True)
class Verdict:
    """What one shape's rows say. Times in ms; the schedule and chunks of the best and of auto's choice."""

    key: str
    point: dict[str, Any]
    best: tuple[str, int]
    best_ms: float
    chosen: tuple[str, int]
    chosen_ms: float
    auto_ms: float
    times: dict[str, float]
    errors: tuple[float, ...]

    @property
    def regret(self) -> float:
        """How much longer the choice takes than the best, both as rows of their own."""
        return self.chosen_ms / self.best_ms - 1

    def speedup_over(self, schedule: str) -> float | None:
        """Of auto over the schedule in one chunk; None where it cannot run the shape."""
        return self.times[schedule] / self.chosen_ms if schedule in self.times else None


def judge(result: Mapping[str, Any]) -> Verdict:
    """The verdict on one line of the results. The row of auto is the choice, timed once more as a row of its own."""
    *rows, auto = result["results"]
    by_name = {(row["schedule"], row["chunks"]): row for row in rows}
    best = min(by_name, key=lambda name: by_name[name]["median_ms"])
    chosen = auto["chosen"]["schedule"], auto["chosen"]["chunks"]
    return Verdict(
        key=result["key"],
        point=result["point"],
        best=best,
        best_ms=by_name[best]["median_ms"],
        chosen=chosen,
        chosen_ms=by_name.get(chosen, auto)["median_ms"],
        auto_ms=auto["median_ms"],
        times={row["schedule"]: row["median_ms"] for row in rows if row["chunks"] == 1},
        errors=tuple(abs(row["predicted_ms"] / row["median_ms"] - 1) for row in rows),
    )


@dataclass(frozen=True)
class Summary:
    """All shapes together; `auto_row_regret` takes auto's own row instead of the row of what it chose."""

    shapes: int
    mean_regret: float
    max_regret: float
    mean_auto_row_regret: float
    median_error: float
    median_error_of_choices: float
    winners: dict[str, int]
    speedups: dict[str, tuple[float, float, float]]


def summarise(results: Iterable[Mapping[str, Any]]) -> Summary:
    """The figures of a grid. Raises DataError if it is empty."""
    pairs = [(judge(result), result["results"][-1]) for result in results]
    if not pairs:
        raise DataError("no shape has been measured")
    verdicts = [verdict for verdict, _ in pairs]
    speedups = {}
    for schedule in ("baseline", "deepspeed"):
        values = [value for one in verdicts if (value := one.speedup_over(schedule)) is not None]
        if values:
            speedups[schedule] = (min(values), median(values), max(values))
    return Summary(
        shapes=len(verdicts),
        mean_regret=mean(one.regret for one in verdicts),
        max_regret=max(one.regret for one in verdicts),
        mean_auto_row_regret=mean(max(one.auto_ms / one.best_ms - 1, 0.0) for one in verdicts),
        median_error=median(error for one in verdicts for error in one.errors),
        median_error_of_choices=median(abs(auto["predicted_ms"] / auto["median_ms"] - 1) for _, auto in pairs),
        winners=dict(Counter(one.best[0] for one in verdicts).most_common()),
        speedups=speedups,
    )


def as_lines(verdicts: Sequence[Verdict], summary: Summary) -> Iterator[str]:
    """The table of winners and the figures under it."""
    sizes = f"{'tp':>3} {'esp':>4} {'f':>5} {'n':>6} {'M':>6} {'H':>6}"
    yield f"{sizes}  {'best':12} {'ms':>9}  {'auto':12} {'ms':>9} {'regret':>7}"
    for one in verdicts:
        point = one.point
        tokens = point["batch"] * point["seq"]
        sizes = f"{point['tp']:3} {point['esp']:4} {point['factor']:5g} {tokens:6} {point['hidden']:6} {point['ffn']:6}"
        best, chosen = (f"{name} x {chunks}" for name, chunks in (one.best, one.chosen))
        yield f"{sizes}  {best:12} {one.best_ms:9.1f}  {chosen:12} {one.chosen_ms:9.1f} {one.regret:7.1%}"
    yield (
        f"{summary.shapes} shapes; regret of auto: mean {summary.mean_regret:.1%}, most {summary.max_regret:.1%} "
        f"(by auto's own rows, mean {summary.mean_auto_row_regret:.1%})"
    )
    yield (
        f"error of predicted against measured: median {summary.median_error:.1%} of all rows, "
        f"{summary.median_error_of_choices:.1%} of auto's choices"
    )
    yield "best: " + ", ".join(f"{name} {count}" for name, count in summary.winners.items())
    for name, (low, middle, high) in summary.speedups.items():
        yield f"{name} / auto: {low:.2f} least, {middle:.2f} median, {high:.2f} most"


def write_csv(path: Path, results: Iterable[Mapping[str, Any]]) -> None:
    """One line for each shape and row."""
    names = [field.name for field in fields(GridPoint)]
    columns = ["schedule", "chunks", "chosen", "median_ms", "p10_ms", "p90_ms", "predicted_ms", "processor_ms"]
    columns += ["bytes_intra", "bytes_inter"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *columns])
        for result in results:
            for row in result["results"]:
                chosen = f"{row['chosen']['schedule']} x {row['chosen']['chunks']}" if "chosen" in row else ""
                values = {**row, "chosen": chosen}
                point = [result["point"][name] for name in names]
                writer.writerow([*point, *(values.get(column) for column in columns)])
