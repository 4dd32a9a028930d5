#!/usr/bin/env python3
"""Time our MoE layer beside those of Megatron-Core and DeepSpeed, or a whole GPT step beside Megatron-Core's.

    python tools/bench_peers.py --cluster emulated-2x4 --mcore-python peers/mcore/bin/python \\
        --deepspeed-python peers/deepspeed/bin/python --tp 4 --esp 4 --tokens 512 --hidden 256 --json peers.json

Each peer lives in a virtual environment of its own (tools/peers/README.md); one without a Python is left out. The same
shape, layout and cluster for all. Interleaved are launches: in every round each program runs once from its start, its
warm-up and then --iters passes; the figure of a round is the median of these passes, of the slowest rank from a common
start. A ratio is that of two medians of the same round. Megatron-Core's layer takes slices of the sequence, so it is
compared with ours under --sequence-parallel; DeepSpeed's takes all tokens and is compared with ours without. Where a
program fails, its last lines say why, and the others go on.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import ConfigError, MegatronParmError
from tools.measure.facts import machine_facts
from tools.measure.launcher import Launcher, add_cluster_flags, launcher_of, run_quietly
from tools.measure.peer_programs import NOT_PADDED, PADDED, Program, layer_programs, step_programs


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cluster_flags(parser)
    parser.add_argument("--mcore-python", help="a Python that has megatron-core (default: it is left out)")
    parser.add_argument("--deepspeed-python", help="a Python that has deepspeed (default: it is left out)")
    for name, default, text in (
        ("tp", 4, "ranks that share each dense layer"),
        ("esp", 4, "ranks that share each expert"),
        ("ep", 0, "ranks over which the experts are spread (0: all that esp leaves)"),
        ("tokens", 512, "tokens of a data-parallel rank"),
        ("hidden", 256, "width of the residual stream"),
        ("ffn", 512, "width of one expert"),
        ("num-experts", 8, "experts of a layer"),
        ("topk", 2, "experts a token is sent to"),
        ("warmup", 2, "passes before those that count, in every launch"),
        ("iters", 10, "passes that count, in every launch"),
        ("rounds", 3, "launches of each program"),
        ("timeout", 600, "seconds after which a launch has failed"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--capacity-factor", type=float, default=1.25, help="default: 1.25")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to this file")
    step = parser.add_argument_group("whole steps of a GPT")
    step.add_argument("--step", action="store_true", help="a training step instead of a layer, of Megatron-Core alone")
    for name, default in (("layers", 4), ("heads", 8), ("vocab", 2048)):
        step.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    step.add_argument("--cost-model", help="file of tools/calibrate.py, written if it is missing")
    return parser.parse_args(argv)


def programs_of(flags: argparse.Namespace, launcher: Launcher) -> list[Program]:
    """What is to be run. Raises ConfigError for flags that name nothing to compare."""
    for name in ("tp", "esp", "tokens", "hidden", "ffn", "num_experts", "topk", "iters", "rounds"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(flags, name)} must be at least 1")
    if launcher.world % flags.tp or launcher.world % flags.esp:
        raise ConfigError(
            f"--tp {flags.tp} and --esp {flags.esp} must divide the {launcher.world} ranks of the cluster"
        )
    if flags.step:
        return step_programs(flags, launcher)
    peers = tuple(name for name in ("mcore", "deepspeed") if getattr(flags, f"{name}_python") is not None)
    if not peers:
        raise ConfigError("no peer to compare with: give --mcore-python, --deepspeed-python or both")
    return layer_programs(flags, launcher, peers)


def run_rounds(programs: Sequence[Program], launcher: Launcher, flags: argparse.Namespace, folder: Path) -> None:
    """Every program once in each round, after one launch of each that does not count."""
    for number in range(flags.rounds + 1):
        for place, program in enumerate(programs):
            if program.failure is not None:
                continue
            path = folder / f"{number}-{place}.json"
            written = ["--log-json" if program.script.endswith("pretrain_gpt.py") else "--json", str(path)]
            command = launcher.command(program.python, program.script, [*program.arguments, *written])
            program.failure = run_quietly(command, flags.timeout)
            if program.failure is None and launcher.is_first:
                milliseconds, note = program.read(path)
                program.notes.append(note)
                if number > 0:
                    program.rounds_ms.append(milliseconds)
            show = program.failure or (f"{milliseconds:.1f} ms" if launcher.is_first else "done")
            which = f"round {number} of {flags.rounds}" if number else "trial"
            print(f"{which}: {program.name}: {show}", file=sys.stderr, flush=True)


def ratios(programs: Sequence[Program]) -> dict[str, list[float]]:
    """For each peer, how many times as long as ours it took, round by round."""
    ours = {program.name: program for program in programs if program.is_ours}
    found = {}
    for program in programs:
        if not program.is_ours and program.rounds_ms and ours[program.against].rounds_ms:
            pairs = zip(program.rounds_ms, ours[program.against].rounds_ms, strict=True)
            found[program.name] = [theirs / own for theirs, own in pairs]
    padded, not_padded = found.get(PADDED), found.get(NOT_PADDED)
    if padded and not_padded:
        found["megatron-core, the faster"] = [min(pair) for pair in zip(padded, not_padded, strict=True)]
    return found


def as_json(programs: Sequence[Program], launcher: Launcher, flags: argparse.Namespace) -> dict[str, Any]:
    """All that `--json` writes."""
    shown = {name: value for name, value in vars(flags).items() if not isinstance(value, Path)}
    rows = [
        {
            "program": program.name,
            "against": program.against,
            "median_ms": median(program.rounds_ms) if program.rounds_ms else None,
            "rounds_ms": program.rounds_ms,
            "what": sorted(set(program.notes)),
            "failure": program.failure,
        }
        for program in programs
    ]
    times = {name: {"median": median(values), "rounds": values} for name, values in ratios(programs).items()}
    return {
        "facts": machine_facts(),
        "cluster": launcher.name,
        "world": launcher.world,
        "what": "step" if flags.step else "layer",
        "interleaved": "launches: every program once in each round",
        "flags": shown,
        "results": rows,
        "times_ours": times,
    }


def table(programs: Sequence[Program]) -> str:
    """The results for the eye."""
    lines = [f"{'program':28} {'median ms':>10} {'least':>9} {'most':>9}  what ran"]
    for program in programs:
        if program.rounds_ms:
            low, high = min(program.rounds_ms), max(program.rounds_ms)
            figures = f"{median(program.rounds_ms):10.1f} {low:9.1f} {high:9.1f}"
            lines.append(f"{program.name:28} {figures}  {', '.join(sorted(set(program.notes)))}")
        else:
            lines.append(f"{program.name:28} failed: {(program.failure or 'no round').splitlines()[-1]}")
    for name, values in ratios(programs).items():
        lines.append(f"{name} / ours: {median(values):.2f} (rounds {', '.join(f'{value:.2f}' for value in values)})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit code, 1 if a program failed."""
    flags = parse(argv)
    try:
        launcher = launcher_of(flags)
        programs = programs_of(flags, launcher)
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="bench_peers_") as folder:
        run_rounds(programs, launcher, flags, Path(folder))
    if launcher.is_first:
        print(f"{launcher.name}\n{table(programs)}", flush=True)
        if flags.json is not None:
            flags.json.parent.mkdir(parents=True, exist_ok=True)
            flags.json.write_text(json.dumps(as_json(programs, launcher, flags), indent=1) + "\n")
    return int(any(program.failure for program in programs))


if __name__ == "__main__":
    sys.exit(main())
