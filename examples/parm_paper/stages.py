"""The stages of the paper's experiments, one after the other, each where it was left. Started by run.sh.

    bash examples/parm_paper/run.sh --cluster emulated-2x4 --quick
    python examples/parm_paper/stages.py --cluster emulated-2x4 --results runs/parm_paper --stages calibrate,layers

Stages: calibrate (cost models of every layout), layers (a sample of the reconstructed grid, measured; all of it,
predicted), models (whole GPT and BERT), peers, growth, report. What a stage has left in --results is not done again.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_parm.errors import ConfigError, DataError, MegatronParmError
from megatron_parm.moe.calibrate import read_models
from megatron_parm.moe.cost import CostModel
from tools.measure.facts import machine_facts
from tools.measure.launcher import ROOT, Launcher, add_cluster_flags, launcher_of, run_quietly
from tools.measure.layer_grid import GridPoint, read_results, write_csv, write_grid
from tools.paper.folder import Folder, append_line, read_json, read_lines, write_table
from tools.paper.growth import grown
from tools.paper.points import fits, reconstructed, scaled, stratified
from tools.paper.predicted import VARIATIONS, Cluster, by_layout, check_rows, predicted_rows
from tools.paper.whole_models import (
    SCHEDULES,
    Corpus,
    ModelRun,
    ModelSizes,
    communication_share,
    flags_of,
    read_model_run,
)

STAGES = ("calibrate", "layers", "models", "peers", "growth", "report")
MINUTES = 60.0
PROGRESS = re.compile(r"\d+/\d+ |tp \d+, esp |round \d|trial: ")  # lines of the programs that are shown


@dataclass(frozen=True)
class Amount:
    """How much of everything is measured."""

    layers: int
    layer_iters: int
    chunks: str
    layouts: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]
    time_steps: int
    curve_steps: int
    turns: int
    peer_rounds: int
    growth_clusters: tuple[str, ...]
    warmup: int = 3
    schedules: tuple[str, ...] = SCHEDULES


QUICK = Amount(18, 3, "1,2", ((4, 4),), ("gpt",), 8, 10, 1, 1, ())
FULL = Amount(96, 5, "1,2,4", ((4, 4), (2, 2)), ("gpt", "bert"), 20, 50, 2, 3, ("emulated-4x4", "emulated-8x4"))
TRIAL = Amount(2, 1, "1", ((2, 2),), ("gpt",), 4, 4, 1, 1, (), 1, ("baseline", "auto"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cluster_flags(parser)
    parser.add_argument("--results", type=Path, default=Path("runs/parm_paper"), help="default: runs/parm_paper")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: all")
    parser.add_argument("--quick", action="store_true", help="a smaller sample, fewer steps")
    parser.add_argument("--trial", action="store_true", help="two layers and a few steps: does everything run?")
    parser.add_argument(
        "--scale", type=int, help="divide the layers' sizes (default: 16 on an emulated cluster, else 1)"
    )
    parser.add_argument("--model-scale", type=int, help="divide the models' sizes (default: 4 on an emulated cluster)")
    parser.add_argument("--all-layers", action="store_true", help="measure all 1296, for a real cluster")
    parser.add_argument("--data", type=Path, default=Path("runs/parm_paper_data"), help="folder that run.sh prepares")
    parser.add_argument("--mcore-python", help="a Python that has megatron-core; see tools/peers/README.md")
    parser.add_argument("--deepspeed-python", help="a Python that has deepspeed")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one launch (default 3600)")
    return parser.parse_args(argv)


class Experiment:
    """One run of all stages. On several nodes each runs the same stages; the first one writes."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags, self.launcher = flags, launcher_of(flags)
        self.folder = Folder(flags.results.resolve())
        self.amount = TRIAL if flags.trial else QUICK if flags.quick else FULL
        small = self.launcher.is_emulated
        self.scale = flags.scale or (16 if small else 1)
        self.sizes = ModelSizes().shrunk(flags.model_scale or (4 if small else 1))
        self.points = [scaled(point, self.scale) for point in reconstructed() if fits(point, self.launcher.world)]
        if not self.points:
            raise ConfigError(f"none of the 1296 layers fits {self.launcher.world} ranks; use at least 2")

    def sample(self) -> list[GridPoint]:
        """The layers that are measured, each once: scaled points may coincide."""
        if self.flags.all_layers:
            return list(dict.fromkeys(self.points))
        count = self.amount.layers if self.launcher.world <= 8 else max(self.amount.layers // 4, 2)
        return list(dict.fromkeys(stratified(list(dict.fromkeys(self.points)), count)))

    def say(self, text: str) -> None:
        """A line of progress."""
        print(text, flush=True)

    def launch(self, script: str, arguments: Sequence[str], launcher: Launcher | None = None) -> None:
        """Run a program of ours on every rank. Raises DataError if it fails."""
        command = (launcher or self.launcher).command(sys.executable, str(ROOT / script), list(arguments))
        failure = run_quietly(command, self.flags.timeout, PROGRESS)
        if failure is not None:
            raise DataError(f"{script} failed: {failure}")

    def note_start(self) -> None:
        """Add this start to run.json."""
        if not self.launcher.is_first:
            return
        self.folder.root.mkdir(parents=True, exist_ok=True)
        before = read_json(self.folder.facts) or {"starts": []}
        start = {"facts": machine_facts(), "command": " ".join(sys.argv), "amount": asdict(self.amount)}
        about = {
            "cluster": self.launcher.name,
            "world": self.launcher.world,
            "nodes": self.launcher.nodes,
            "emulated": self.launcher.is_emulated,
            "scale": self.scale,
            "model_sizes": asdict(self.sizes),
        }
        kept = {name: before.get(name, value) for name, value in about.items()}
        if kept != json.loads(json.dumps(about)):
            raise ConfigError(
                f"--results {self.folder.root} holds another cluster's run ({kept['cluster']}); name a new one"
            )
        self.folder.facts.write_text(json.dumps({**about, "starts": [*before["starts"], start]}, indent=1) + "\n")

    def grid_flags(self, grid: Path, results: Path) -> list[str]:
        """The flags of tools/bench_layer_grid.py that all launches share."""
        words = ["--grid", str(grid), "--results", str(results), "--calibrate", "layout"]
        words += ["--moe-cost-model", str(self.folder.cost_model), "--chunks", self.amount.chunks]
        return [*words, "--iters", str(self.amount.layer_iters)]

    def calibrate(self) -> None:
        """A cost model for every layout of the grid, from a point of middling size."""
        by_layout: dict[tuple[int, int], list[GridPoint]] = {}
        for point in self.points:
            by_layout.setdefault((point.tp, point.esp), []).append(point)
        middle = [points[len(points) // 2] for points in by_layout.values()]
        grid = self.folder.table("calibrated_layers")
        if self.launcher.is_first:
            write_grid(grid, middle)
        if len(self.fitted()) < len(by_layout):
            self.launch("tools/bench_layer_grid.py", [*self.grid_flags(grid, self.folder.layers), "--only-calibrate"])
        self.say(f"cost models of {len(by_layout)} layouts in {self.folder.cost_model}")

    def fitted(self) -> dict[tuple[int, int], CostModel]:
        """The measured models of this cluster, by (tp, esp)."""
        return by_layout(read_models(self.folder.cost_model), self.launcher)

    def layers(self) -> None:
        """The sample measured, the whole grid predicted."""
        grid = self.folder.table("sample")
        if self.launcher.is_first:
            write_grid(grid, self.sample())
        left = [point for point in self.sample() if point.key not in read_results(self.folder.layers)]
        if left:
            self.say(f"{len(left)} of {len(self.sample())} layers to measure")
            self.launch("tools/bench_layer_grid.py", self.grid_flags(grid, self.folder.layers))
        if self.launcher.is_first:
            write_csv(self.folder.table("layers"), read_results(self.folder.layers).values())
            launcher = self.launcher
            variations = () if self.flags.trial else VARIATIONS
            rows = predicted_rows(self.fitted(), self.scale, launcher.world, launcher.nodes, variations)
            write_table(self.folder.table("predicted"), rows)

    def corpus(self, kind: str) -> Corpus:
        """The prepared text of a kind of model. Raises ConfigError if run.sh has not prepared it."""
        data = self.flags.data.resolve() / kind
        prefix = data / ("corpus_text_document" if kind == "gpt" else "corpus_text_sentence")
        if not prefix.with_suffix(".idx").exists():
            raise ConfigError(f"--data {self.flags.data} has no {kind} text; run.sh prepares it")
        words: tuple[str, ...] = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(data / "vocab.txt"))
        if kind == "gpt":
            words = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(data / "vocab.json"))
            words += ("--merge-file", str(data / "merges.txt"))
        return Corpus(prefix, words)

    def model_runs(self) -> list[ModelRun]:
        """Every run, in the order of its start: turns of all schedules, every second one in reverse."""
        runs = []
        world = self.launcher.world
        layouts = [(tp, esp) for tp, esp in self.amount.layouts if world % tp == 0 and world % esp == 0]
        for kind in self.amount.kinds:
            for tp, esp in layouts:
                for turn in range(self.amount.turns):
                    order = self.amount.schedules[:: 1 if turn % 2 == 0 else -1]
                    runs += [ModelRun(kind, schedule, tp, esp, "time", turn) for schedule in order]
            runs += [ModelRun(kind, schedule, *layouts[0], "curve", 0) for schedule in self.amount.schedules if layouts]
        return runs

    def models(self) -> None:
        """Whole models, a launch each: step time, tokens, memory, communication, losses."""
        done = {row["key"] for row in read_lines(self.folder.models)}
        left = [run for run in self.model_runs() if run.key not in done]
        logs = self.folder.root / "models"
        started = time.monotonic()
        for number, run in enumerate(left):
            log, trace = logs / f"{run.key}.jsonl", logs / f"{run.key}.trace.json"
            if self.launcher.is_first:
                logs.mkdir(parents=True, exist_ok=True)
                log.unlink(missing_ok=True)
            steps = self.amount.time_steps if run.purpose == "time" else self.amount.curve_steps
            corpus = self.corpus(run.kind)
            words = flags_of(run, self.sizes, self.launcher.world, steps, corpus, self.folder.cost_model, log)
            if run.purpose == "time":
                words += ["--trace", str(trace), "--profile-step-start", "1", "--profile-step-end", "2"]
            self.launch(run.script, words)
            if self.launcher.is_first:
                self._keep_model(run, log, trace)
            spent = time.monotonic() - started
            to_go = spent / (number + 1) * (len(left) - number - 1)
            self.say(f"{number + 1}/{len(left)} {run.key}; about {to_go / MINUTES:.1f} minutes left")

    def _keep_model(self, run: ModelRun, log: Path, trace: Path) -> None:
        row = read_model_run(log, run, min(self.amount.warmup, self.amount.time_steps - 1))
        if run.purpose == "time":
            figures = trace.with_suffix(".figures.json")
            self.alone("tools/analyse_trace.py", [str(trace), "--json", str(figures)])
            row["exposed_communication"] = communication_share(read_json(figures))
            trace.unlink()
        append_line(self.folder.models, row)
        columns = [name for name in row if name != "losses"]
        rows = read_lines(self.folder.models)
        write_table(self.folder.table("models"), [{name: one.get(name, "") for name in columns} for one in rows])
        write_table(
            self.folder.table("losses"),
            [
                {"key": one["key"], "iteration": number + 1, "lm_loss": loss}
                for one in rows
                for number, loss in enumerate(one["losses"])
            ],
        )

    def alone(self, script: str, arguments: Sequence[str]) -> None:
        """Run a program of ours in one process. Raises DataError if it fails."""
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise DataError(f"{script} failed: {(done.stderr or done.stdout)[-1000:]}")

    def peers(self) -> None:
        """Layers and a whole step beside the peers that have a Python."""
        given = {"--mcore-python": self.flags.mcore_python, "--deepspeed-python": self.flags.deepspeed_python}
        words = [word for name, value in given.items() if value is not None for word in (name, value)]
        if not words:
            self.say("no peer was given a Python (--mcore-python, --deepspeed-python): left out")
            return
        cluster = [word for name in CLUSTER_FLAGS if (value := getattr(self.flags, name)) is not None
                   for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
        kinds: dict[str, list[str]] = {"layer": []} | ({"step": ["--step"]} if self.flags.mcore_python else {})
        for tp, esp in self.amount.layouts:
            for kind, extra in kinds.items():
                path = self.folder.root / f"peers-{kind}-tp{tp}-esp{esp}.json"
                if path.exists():
                    continue
                sizes = ["--tp", str(tp), "--esp", str(esp), "--rounds", str(self.amount.peer_rounds)]
                command = [sys.executable, str(ROOT / "tools/bench_peers.py"), *cluster, *words, *sizes, *extra]
                # a peer that fails is a row of the results, not the end of the run
                failure = run_quietly([*command, "--json", str(path)], self.flags.timeout, PROGRESS)
                if self.launcher.is_first and not path.exists():
                    raise DataError(f"tools/bench_peers.py failed: {failure}")
                self.say(f"peers: {path.name}")

    def growth(self) -> None:
        """Predictions for 8 to 4096 ranks of named kinds; on an emulated cluster, checked at 16 and 32 ranks."""
        if self.launcher.is_first:
            shape = GridPoint(4, 4, 1.2, 4, 1024, 2048, 8192, 8).shape(8, 1, 2)
            shape_of_two = GridPoint(2, 2, 1.2, 4, 1024, 2048, 8192, 8).shape(8, 1, 2)
            rows = [
                {"tp": one.tp, "esp": one.esp, **asdict(found)} for one in (shape, shape_of_two) for found in grown(one)
            ]
            write_table(self.folder.table("growth"), rows)
        clusters = self.amount.growth_clusters if self.launcher.is_emulated else ()
        rows = [row for name in clusters for row in self.growth_check(name)]
        if rows:
            write_table(self.folder.table("growth_check"), rows)

    def growth_check(self, name: str) -> list[dict[str, object]]:
        """The communication of each schedule on a larger emulated cluster, predicted from this one and measured."""
        larger = launcher_of(argparse.Namespace(**{**vars(self.flags), "cluster": name}))
        place, model_file = self.folder.table(f"growth_layers_{name}"), self.folder.root / f"{name}.json"
        layouts = self.amount.layouts
        points = [GridPoint(tp, esp, 1.25, 1, 512, 256, 512, 8) for tp, esp in layouts]
        write_grid(place, points)
        results = self.folder.root / f"{name}.jsonl"
        words = ["--grid", str(place), "--results", str(results), "--calibrate", "layout", "--chunks", "1"]
        words += ["--moe-cost-model", str(model_file), "--iters", "3"]
        if set(read_results(results)) < {point.key for point in points}:
            self.launch("tools/bench_layer_grid.py", words, larger)
        if not self.launcher.is_first:
            return []
        found = read_results(results)
        here = Cluster(self.launcher.world, self.launcher.nodes, self.fitted())
        there = Cluster(larger.world, larger.nodes, by_layout(read_models(model_file), larger))
        pairs = [(point, found[point.key]) for point in points if point.key in found]
        return [{"cluster": name, **row} for point, result in pairs for row in check_rows(point, result, here, there)]

    def report(self) -> None:
        """The HTML page and the text."""
        if self.launcher.is_first:
            self.alone("tools/report.py", [str(self.folder.root), "--html", str(self.folder.root / "report.html"),
                                           "--text", str(self.folder.root / "report.txt")])  # fmt: skip
            self.say((self.folder.root / "report.txt").read_text(encoding="utf-8"))
            self.say(f"the whole report: {self.folder.root / 'report.html'}")


CLUSTER_FLAGS = ("cluster", "intra", "inter", "nodes", "ranks_per_node", "node_rank", "master_addr", "master_port")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; returns the exit code."""
    flags = parse(argv)
    wanted = flags.stages.split(",")
    try:
        if not set(wanted) <= set(STAGES):
            raise ConfigError(f"--stages {flags.stages}: use {', '.join(STAGES)}, with commas between")
        experiment = Experiment(flags)
        experiment.note_start()
        for place, name in enumerate(name for name in STAGES if name in wanted):
            started = time.monotonic()
            experiment.say(f"\n== {place + 1}/{len(wanted)} {name}")
            action: Callable[[], None] = getattr(experiment, name)
            action()
            experiment.say(f"{name}: {(time.monotonic() - started) / MINUTES:.1f} minutes")
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
