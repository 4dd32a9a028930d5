"""The list of flags. Reference: the training parser itself, and one flag of each kind by hand."""

import re
from pathlib import Path

import pytest

from megatron_parm.config.parser import build_parser
from megatron_parm.config.run import SECTIONS
from tools.list_flags import main, markdown, plain

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_page_in_docs_is_what_the_tool_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == markdown(), "run: python tools/list_flags.py --markdown > docs/flags.md"


def test_every_flag_that_training_knows_is_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A name of its own line, or among the other names of one."""
    known = build_parser(SECTIONS.values(), knows_megatron=True).known
    assert main([]) == 0
    listed = []
    for line in capsys.readouterr().out.splitlines():
        listed.append(line.split("  [", 1)[0])
        listed += re.findall(r"--[\w-]+", line.partition("; also ")[2])
    assert sorted(listed) == sorted(known)


@pytest.mark.parametrize(
    "line",
    [
        "| `--moe-router-topk` | experts a token is sent to [experts] | default 2 |  |",
        "| `--lr` | peak learning rate | required |  |",
        "| `--clip-grad` | largest norm of all gradients together | 0 = no clipping; default 1.0 |  |",
        "| `--context-parallel-size` | context parallelism is not in this release; use size 1 | 1 |",
        "| default 1e-05 | --layernorm-epsilon |",
        "| `--use-cpu-initialization` | weights are always drawn on the CPU, the same for every layout",
    ],
)
def test_known_lines(line: str) -> None:
    assert line in markdown()


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {3, 4, 5}
    assert plain().count("\n") == len(rows)
