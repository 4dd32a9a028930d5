"""The comparison with the peers. References: times by hand; peers that are small programs of the same interface."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run
from tools import bench_peers
from tools.measure import launcher, peer_programs
from tools.measure.launcher import launcher_of
from tools.measure.peer_programs import DEEPSPEED, NOT_PADDED, OURS, OURS_SLICED, PADDED, Program

SMALL = "--cluster torchrun --ranks-per-node 2 --tp 2 --esp 2 --tokens 16 --hidden 8 --ffn 16 --num-experts 4"
PEER = """
import json, os, sys
from pathlib import Path
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "fail" in Path(__file__).name:
    sys.exit("error: this peer cannot run here")
if os.environ["RANK"] == "0":
    found = {"program": "peer", "version": "1.2", "median_ms": 7.0, "times_ms": [7.0]}
    Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(found))
"""


def _program(name: str, against: str, rounds: Sequence[float], failure: str | None = None) -> Program:
    return Program(name, against, "python", "x.py", [], lambda _: (0.0, ""), list(rounds), ["v"], failure)


def _parsed(words: str) -> argparse.Namespace:
    return bench_peers.parse(words.split())


def test_ratios_pair_the_rounds() -> None:
    programs = [
        _program(OURS_SLICED, "", [100.0, 200.0, 100.0]),
        _program(PADDED, OURS_SLICED, [150.0, 260.0, 140.0]),
        _program(NOT_PADDED, OURS_SLICED, [140.0, 280.0, 150.0]),
        _program(OURS, "", [], "exit code 1\nno gloo"),
        _program(DEEPSPEED, OURS, [300.0, 300.0, 300.0]),
    ]
    found = bench_peers.ratios(programs)
    assert found[PADDED] == pytest.approx([1.5, 1.3, 1.4]) and found[NOT_PADDED] == pytest.approx([1.4, 1.4, 1.5])
    assert found["megatron-core, the faster"] == pytest.approx([1.4, 1.3, 1.4])
    assert DEEPSPEED not in found, "ours has no round to compare with"
    table = bench_peers.table(programs)
    assert "failed: no gloo" in table and "megatron-core, padded / ours: 1.40 (rounds 1.50, 1.30, 1.40)" in table


def test_every_peer_gets_the_same_layer() -> None:
    flags = _parsed("--cluster emulated-2x4 --mcore-python M --deepspeed-python D --tp 4 --esp 2")
    programs = bench_peers.programs_of(flags, launcher_of(flags))
    assert [program.name for program in programs] == [OURS_SLICED, PADDED, NOT_PADDED, OURS, DEEPSPEED]
    for program in programs:
        given = program.arguments
        values = {word: given[place + 1] for place, word in enumerate(given[:-1]) if word.startswith("--")}
        assert (values["--tp"], values["--ep"], values["--esp"], values["--topk"]) == ("4", "4", "2", "2")
        assert values["--seq" if program.is_ours else "--tokens"] == "512"
        assert ("--sequence-parallel" in given) == (program.name == OURS_SLICED)
        assert ("--pad" in given) == (program.name == PADDED)
    assert [program.python for program in programs] == [sys.executable, "M", "M", sys.executable, "D"]


def test_our_training_step_is_a_valid_run() -> None:
    flags = _parsed("--step --mcore-python M --tp 4 --esp 4 --cluster emulated-2x4")
    ours, padded, _ = bench_peers.programs_of(flags, launcher_of(flags))
    config, notes = parse_run_config(ours.arguments, model="GPT")
    check_run(config, 8)
    assert notes == [] and config.parallel.sequence_parallel
    assert padded.arguments[-1] == "--pad" and padded.script.endswith("mcore_gpt_step.py")


def test_a_peer_that_fails_leaves_the_others_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mcore_layer.py", "deepspeed_fail.py"):
        (tmp_path / name).write_text(PEER)
    (tmp_path / "mcore_layer.py").rename(tmp_path / "deepspeed_layer.py")
    (tmp_path / "deepspeed_fail.py").rename(tmp_path / "mcore_layer_fail.py")
    real = peer_programs.layer_programs

    def stand_ins(*arguments: object) -> list[Program]:
        programs = [one for one in real(*arguments) if one.name in (OURS, DEEPSPEED, PADDED)]  # type: ignore[arg-type]
        for program in programs:
            if program.name != OURS:
                stem = "deepspeed_layer" if program.name == DEEPSPEED else "mcore_layer_fail"
                program.script, program.against = str(tmp_path / f"{stem}.py"), OURS
        return programs

    monkeypatch.setattr(bench_peers, "layer_programs", stand_ins)
    file = tmp_path / "peers.json"
    argv = f"{SMALL} --rounds 1 --iters 1 --warmup 0 --mcore-python {sys.executable} --json {file}".split()
    assert bench_peers.main([*argv, "--deepspeed-python", sys.executable]) == 1
    found = json.loads(file.read_text())
    rows = {row["program"]: row for row in found["results"]}
    assert rows[DEEPSPEED]["rounds_ms"] == [7.0] and rows[DEEPSPEED]["what"] == ["version 1.2"]
    assert "this peer cannot run here" in rows[PADDED]["failure"] and rows[PADDED]["median_ms"] is None
    assert rows[OURS]["median_ms"] > 0
    assert found["times_ours"] == {
        DEEPSPEED: {"median": 7.0 / rows[OURS]["median_ms"], "rounds": [7.0 / rows[OURS]["median_ms"]]}
    }
    assert found["facts"]["torch"] and found["world"] == 2
    assert "failed:" in capsys.readouterr().out


def test_how_a_program_is_started() -> None:
    def start(words: str) -> launcher.Launcher:
        return launcher_of(_parsed(words))

    one = start("--cluster emulated-8x4 --intra 2gbit --inter 500mbit")
    assert (one.nodes, one.ranks_per_node, one.world, one.is_first) == (8, 4, 32, True)
    text = " ".join(one.command("P", "S", ["A"]))
    assert "--nodes 8 --ranks-per-node 4 --intra 2gbit --inter 500mbit --no-python -- P S A" in text
    assert start("--cluster emulated-8").nodes == 1
    several = start("--cluster torchrun --nodes 4 --ranks-per-node 8 --node-rank 2 --master-addr first")
    assert (several.world, several.is_first, several.is_emulated) == (32, False, False)
    text = " ".join(several.command("P", "S", []))
    assert "--nnodes 4 --node-rank 2 --master-addr first --master-port 29500 --no-python P S" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cluster emulated-x", "--cluster emulated-x: not known"),
        ("--cluster torchrun --nodes 2", "--nodes 2 needs --master-addr"),
        ("", "no peer to compare with"),
        ("--mcore-python M --tp 3", "--tp 3 and --esp 4 must divide the 8 ranks"),
        ("--mcore-python M --iters 0", "--iters 0 must be at least 1"),
        ("--step", "--step needs --mcore-python"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_peers.main(flags.split()) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1


def test_a_launch_that_takes_too_long_is_ended() -> None:
    found = launcher.run_quietly([sys.executable, "-c", "print('alive', flush=True); import time; time.sleep(60)"], 2)
    assert found is not None and found.startswith("no end after 2 s") and "alive" in found
    assert launcher.run_quietly([sys.executable, "-c", ""], 60) is None
    found = launcher.run_quietly([sys.executable, "-c", "print(1 / 0)"], 60)
    assert found is not None and found.splitlines()[-1] == "ZeroDivisionError: division by zero"
