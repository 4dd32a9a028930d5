"""Draw the loss curves of one or more runs from their `--log-json` files, or print them as a small table. Floor 8.

    python tools/plot_run.py run.jsonl --output loss.png
    python tools/plot_run.py s1.jsonl baseline.jsonl --output both.png --smooth 20 --reference "unigram entropy=6.1"
    python tools/plot_run.py run.jsonl --text

A resumed run appends to its file: where an iteration appears twice the later line wins, and each restart is a thin
dotted line. Lines that a killed writer left torn are skipped with a note.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.errors import ConfigError, DataError, MegatronParmError
from megatron_parm.observe.json_lines import RunLog, number_of, read_run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")  # Okabe-Ito: for every eye
PICTURE_SUFFIXES = (".png", ".pdf", ".svg")
TEXT_ROWS = 12


@dataclass(frozen=True)
class Curves:
    """One run: x -> loss of training and validation in order of x, and the x of every restart."""

    label: str
    train: dict[float, float]
    valid: dict[float, float]
    restarts: list[float]


@dataclass(frozen=True)
class Reference:
    """A horizontal line to compare with, such as the unigram entropy."""

    name: str
    value: float


def parse_reference(text: str) -> Reference:
    """`name=value`; raises ConfigError for anything else."""
    name, separator, value = text.rpartition("=")
    try:
        return Reference(name.strip(), float(value)) if separator and name.strip() else _refuse(text)
    except ValueError:
        return _refuse(text)


def _refuse(text: str) -> Reference:
    raise ConfigError(f'--reference {text!r} must be "name=value" with a number, for example "unigram entropy=6.1"')


def curves_of(log: RunLog, label: str, loss: str, x: str) -> Curves:
    """The curves of field `loss` over field `x`; the later of two lines with the same x wins."""
    train: dict[float, float] = {}
    valid: dict[float, float] = {}
    restarts: list[float] = []
    samples_at: dict[float, float] = {}
    for event in log.events:
        place, value = number_of(event.get(x)), number_of(event.get(loss))
        iteration = number_of(event.get("iteration"))
        if event["event"] == "start" and iteration > 0:
            restarts.append(iteration if x == "iteration" else samples_at.get(iteration, math.nan))
        if math.isnan(place) or loss not in event:
            continue
        samples_at[iteration] = number_of(event.get("consumed_samples"))
        if event["event"] == "train" and not event.get("skipped"):
            train[place] = value
        elif event["event"] == "valid" and event.get("split", "valid") == "valid":
            valid[place] = value
    return Curves(label, dict(sorted(train.items())), dict(sorted(valid.items())), restarts)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over `window` values around each place, fewer at the ends; a value that is not finite is left out."""
    before, after = (window - 1) // 2, window // 2
    means = []
    for place in range(len(values)):
        around = values[max(0, place - before) : place + after + 1]
        finite = [value for value in around if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means


def draw(runs: Sequence[Curves], references: Sequence[Reference], path: Path, args: argparse.Namespace) -> None:
    """Draw all runs into one picture at `path`."""
    figure = Figure(figsize=(10, 6), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, run in enumerate(runs):
        colour = COLOURS[place % len(COLOURS)]
        _draw_run(axes, run, colour, colour if len(runs) > 1 else COLOURS[1], args.smooth)
    for reference in references:
        label = f"{reference.name} ({reference.value:.3f})"
        axes.axhline(reference.value, color="#444444", linestyle=(0, (6, 3)), linewidth=1.2, label=label)
    axes.set_xlabel("iteration" if args.x == "iteration" else "samples seen", fontsize=13)
    axes.set_ylabel("loss (nats per token)" if args.loss == "lm_loss" else args.loss, fontsize=13)
    axes.set_title(args.title, fontsize=15, fontweight="bold")
    axes.tick_params(labelsize=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=12)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise DataError(f"cannot write --output {path}: {error.strerror}") from error


def _draw_run(axes: Axes, run: Curves, colour: str, valid_colour: str, window: int) -> None:
    x, y = list(run.train), list(run.train.values())
    if window > 1:
        axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(x, smoothed(y, window), color=colour, linewidth=2, label=f"{run.label}: training, mean of {window}")
    elif x:
        axes.plot(x, y, color=colour, linewidth=1.4, alpha=0.75, label=f"{run.label}: training")
    if run.valid:
        axes.plot(
            list(run.valid),
            list(run.valid.values()),
            color=valid_colour,
            linewidth=1.4,
            linestyle="--",
            marker="o",
            markersize=6,
            markeredgecolor="white",
            label=f"{run.label}: validation",
            zorder=3,
        )
    for number, restart in enumerate(place for place in run.restarts if not math.isnan(place)):
        axes.axvline(
            restart, color=colour, linewidth=0.9, linestyle=":", label=None if number else f"{run.label}: resumed"
        )


def table(run: Curves, x: str) -> str:
    """At most TEXT_ROWS evenly spaced rows of a run, the last one always among them, and every validation."""
    places = sorted(run.train.keys() | run.valid.keys())
    step = max(1, math.ceil(len(run.train) / TEXT_ROWS))
    shown = set(list(run.train)[step - 1 :: step]) | set(list(run.train)[-1:]) | run.valid.keys()
    lines = [run.label, f"{x:>16}  {'training':>12}  {'validation':>12}"]
    for place in places:
        if place in shown:
            cells = (f"{curve[place]:12.6f}" if place in curve else " " * 12 for curve in (run.train, run.valid))
            lines.append(f"{place:16.0f}  " + "  ".join(cells))
    lines += [f"resumed at {restart:.0f}" for restart in run.restarts]
    return "\n".join(line.rstrip() for line in lines)


def labels_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each file: its stem, with its folder where two stems are equal."""
    stems = [path.stem for path in paths]
    return [
        stem if stems.count(stem) == 1 else f"{path.resolve().parent.name}/{stem}"
        for path, stem in zip(paths, stems, strict=True)
    ]


def build_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(description="Draw the loss curves of runs from their --log-json files.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.jsonl", help="log of a run; several share a picture")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="picture to write (png, pdf or svg)")
    parser.add_argument("--text", action="store_true", help="print a small table of each run")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="mean of N training values (default 1: off)")
    parser.add_argument("--reference", action="append", default=[], metavar="NAME=VALUE", help="a horizontal line")
    parser.add_argument("--loss", default="lm_loss", metavar="FIELD", help="field to draw (default lm_loss)")
    parser.add_argument("--x", default="iteration", choices=("iteration", "consumed_samples"), help="the x axis")
    parser.add_argument("--title", default="Loss", help="title of the picture")
    return parser


def load(path: Path, label: str, args: argparse.Namespace) -> Curves:
    """Read one run; raises DataError if it has nothing to draw."""
    log = read_run(path)
    if log.unreadable_lines:
        numbers = ", ".join(map(str, log.unreadable_lines[:5])) + (", ..." if len(log.unreadable_lines) > 5 else "")
        print(
            f"note: {path}: skipped {len(log.unreadable_lines)} line(s) cut off or not JSON: {numbers}", file=sys.stderr
        )
    run = curves_of(log, label, args.loss, args.x)
    if not run.train and not run.valid:
        raise DataError(
            f"{path} holds no {args.loss} in a train or valid event ({len(log.events)} events read); "
            "give the file that --log-json wrote, and a field of it with --loss"
        )
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and print what was asked for; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        if args.output is None and not args.text:
            raise ConfigError("nothing to do: give --output FILE.png, --text, or both")
        if args.output is not None and args.output.suffix not in PICTURE_SUFFIXES:
            raise ConfigError(f"--output {args.output} must end in .png, .pdf or .svg")
        references = [parse_reference(text) for text in args.reference]
        runs = [load(path, label, args) for path, label in zip(args.runs, labels_of(args.runs), strict=True)]
        if args.text:
            print("\n\n".join(table(run, args.x) for run in runs))
            for reference in references:
                print(f"{reference.name}: {reference.value:.6f}")
        if args.output is not None:
            draw(runs, references, args.output, args)
            print(f"wrote {args.output}")
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
