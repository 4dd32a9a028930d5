"""The documents say what is so: their commands parse, the files they name exist, their tables are those of the code.

References: the parsers of the entrances, settings classes, errors, records and sources. Nothing is trained.
"""

import ast
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_parm import errors
from megatron_parm.config.checks import NEED_SLOTS
from megatron_parm.config.fields import Flag, flags_of
from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.parser import ModelKind, parse_run_config
from megatron_parm.config.run import check_run
from megatron_parm.errors import ConfigError, MegatronParmError
from megatron_parm.moe import cost
from megatron_parm.moe.cost import CostModel, LayerShape, Line, Plan, Stage
from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.observe.json_lines import as_event
from megatron_parm.parallel import overlapped
from megatron_parm.training import entrance
from tests.observe.fixtures import END, SAVE, START, TRAIN, VALID

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "requirements-gpu.txt"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = [(ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOE = (ROOT / "docs/moe.md").read_text(encoding="utf-8")
LOGS = (ROOT / "docs/logs.md").read_text(encoding="utf-8")
PARM = (ROOT / "docs/parm.md").read_text(encoding="utf-8")
TRAINING = "pretrain_gpt.py"
TRAININGS: dict[str, ModelKind] = {TRAINING: "GPT", "pretrain_bert.py": "BERT", "finetune_bert.py": "classifier"}
OUR_PATHS = re.compile(
    r"(?:\.ci|tools|examples|tests|docs|megatron_parm|requirements)[\w./-]*\.\w+|(?:pretrain|finetune)_\w+\.py"
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a document."""

    document: str
    language: str
    text: str


def _blocks(language: str) -> list[Block]:
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
    return [
        Block(name, found[1], found[2])
        for name in DOCUMENTS
        for found in fence.finditer((ROOT / name).read_text(encoding="utf-8"))
        if found[1] == language
    ]


def _commands() -> Iterator[tuple[str, list[str]]]:
    for block in _blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "--" in words:  # the emulated cluster, and what runs on it
                place = words.index("--")
                words, guest = words[:place], words[place + 1 :]
                sizes = dict(pairwise(words))
                launcher = f"torchrun --nnodes {sizes['--nodes']} --nproc-per-node {sizes['--ranks-per-node']}"
                yield block.document, [*launcher.split(), *guest]
            if words:
                yield block.document, words


COMMANDS = [pytest.param(words, id=f"{document}-{' '.join(words)[:60]}") for document, words in _commands()]


def _script_of(words: list[str]) -> int:
    """The place of the script in a command."""
    return next(place for place, word in enumerate(words) if re.search(r"\.(py|sh)$", word))


def _world_of(words: list[str]) -> int:
    """The ranks that the launcher in front of the script starts; its flags must be torchrun's."""
    if words[0] != "torchrun":
        return 1
    launcher = get_args_parser().parse_args(words[1:])
    most_nodes = launcher.nnodes.split(":")[-1]
    return int(launcher.nproc_per_node) * int(most_nodes)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_names_files_that_exist_and_flags_that_are_known(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training command must be a valid configuration for its number of ranks."""
    assert words[0] in ("bash", "python", "torchrun")
    place = _script_of(words)
    script, arguments = words[place], words[place + 1 :]
    assert (ROOT / script).is_file(), script
    world = _world_of(words)
    if script in TRAININGS:
        for block in _blocks("yaml"):
            (tmp_path / block.text.split("\n")[0].removeprefix("# ")).write_text(block.text)
        monkeypatch.chdir(tmp_path)
        config, notes = parse_run_config(arguments, model=TRAININGS[script])
        check_run(config, world)
        assert notes == []
    elif script.endswith(".py"):
        main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit):
            main(*[["--help"]] * len(inspect.signature(main).parameters))
        shown = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
        assert {word for word in arguments if word.startswith("--")} <= shown


def test_there_are_commands_of_every_kind() -> None:
    """The blocks are found at all, and every tool is shown or named somewhere."""
    scripts = {words[_script_of(words)] for _, words in _commands()}
    tools = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").glob("*.py")}
    assert {*TRAININGS, "examples/quickstart.sh", "tests/run.sh"} <= scripts
    assert {tool for tool in tools - scripts if not any(tool in text for text in TEXTS)} == set()
    assert {1, 8, 32} <= {_world_of(words) for _, words in _commands()}


@pytest.mark.parametrize("flag", ["--num-expert 8", "--expert-model-parallel-size 3"])
def test_a_wrong_command_would_be_found(flag: str) -> None:
    words = next(words for _, words in _commands() if TRAINING in words and "--config" not in words)
    with pytest.raises(ConfigError):
        check_run(parse_run_config([*words[_script_of(words) + 1 :], *flag.split()])[0], _world_of(words))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_and_links_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    for target in links:
        assert ((ROOT / name).parent / target).exists(), target
    for path in OUR_PATHS.findall(text):
        assert (ROOT / path).exists(), path
    rooms = [room.name for room in (ROOT / "megatron_parm").iterdir() if room.is_dir()]
    for path in re.findall(rf"`((?:{'|'.join(rooms)})/\w+\.py)`", text):
        assert (ROOT / "megatron_parm" / path).exists(), path
    anchors = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.+)$", text, re.M)]
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors)


def _rows(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    section = re.split(r"\n##+ ", re.split(rf"\n##+ {heading}\n", text)[1])[0]
    lines = section[section.index("| ") :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| ---")][1:]


def _default_of(flag: Flag) -> str:
    return re.sub(r"^(0 = \w+; )?default:? ", "", flag.help_line().rpartition(" (")[2].removesuffix(")"))


def test_the_moe_table_is_that_of_the_settings() -> None:
    found = [(row[0].strip("`"), row[1]) for row in _rows(MOE, "All flags")]
    assert found == [(flag.spelling, _default_of(flag)) for flag in flags_of(MoEConfig)]


def test_every_exit_code_is_listed() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MegatronParmError)]
    codes = {kind.exit_code for kind in kinds} | {0}
    codes |= {value for name, value in vars(entrance).items() if name.startswith("EXIT_")}
    assert [int(row[0]) for row in _rows(README, "Exit codes of a worker")] == sorted(codes)


def test_every_field_of_the_json_log_is_listed() -> None:
    listed = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in _rows(LOGS, "The JSON log")}
    assert set(listed) == {"start", "train", "valid", "save", "end"}
    inner = {"config", "predicted_ms", "spans_ms"}  # objects whose keys are not fixed
    for record in (START, TRAIN, VALID, SAVE, END):
        event = as_event(record)
        names = set(event) - {"event"}
        for name, value in event.items():
            if isinstance(value, dict) and name not in inner:
                names |= set(value)
        assert names - {"spans_ms"} <= listed[str(event["event"])], event["event"]


def test_the_sections_of_the_paper_that_the_sources_cite_are_there() -> None:
    cited: set[int] = set()
    for path in (ROOT / "megatron_parm").rglob("*.py"):
        for first, last in re.findall(r"parm\.md\s+sections? (\d)[^.\n]*?(?:(?:and|to) (\d))?", path.read_text()):
            cited |= {int(first), int(last or first)}
    assert cited and cited <= {int(number) for number in re.findall(r"^## (\d)\. ", PARM, re.M)}


def _code_of(schedule: str) -> list[str]:
    """The lines of a schedule after its docstring, save assertions and the frame around the stages of a pipeline."""
    source = (ROOT / "megatron_parm/moe/schedules.py").read_text(encoding="utf-8")
    found = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == schedule)
    assert ast.get_docstring(found) and found.end_lineno
    code = [line.split("  #")[0].strip() for line in source.splitlines()[found.body[1].lineno - 1 : found.end_lineno]]
    frame = re.compile(r"assert .*|\w+ = pipelined\(|\)")
    return [line.removesuffix(",") for line in code if line and not frame.fullmatch(line)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_step_of_the_paper_is_a_line_of_the_schedule(schedule: str) -> None:
    assert [row[1].strip("`") for row in _rows(PARM, f"(?i:{schedule})")] == _code_of(schedule)


def test_the_lines_of_a_schedule_are_found_at_all() -> None:
    assert len(_code_of("baseline")) == 8
    assert _code_of("baseline")[0] == "gathered = esp_all_gather(tokens, ctx)"


def test_the_collectives_that_overlap_are_those_of_the_code() -> None:
    own = {
        name: kind for name, kind in vars(overlapped).items() if getattr(kind, "__module__", "") == overlapped.__name__
    }
    kinds = {name for name, kind in own.items() if hasattr(kind, "adjoint")} - {"Collective"}
    assert {row[0].strip("`") for row in _rows(PARM, "3. Gradients")} == kinds


def test_what_is_said_to_stand_in_a_file_stands_there() -> None:
    named = re.findall(r"`(\w+)` in\s+`([\w/]+\.py)`", PARM)
    assert len(named) >= 5
    for name, path in named:
        source = (ROOT / "megatron_parm" / path).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", source, re.M), f"{name} in {path}"
    for owner, name in re.findall(r"`(LayerShape|CostModel)\.(\w+)`", PARM):
        assert hasattr({"LayerShape": LayerShape, "CostModel": CostModel}[owner], name), name


COLLECTIVES = {"A2A": "all_to_all", "AG": "all_gather", "RS": "reduce_scatter", "AR": "all_reduce"}
AXES = {"EP": "ep", "EP&ESP": "ep_esp", "MP": "tp", "ESP": "esp", "inside": "inside", "between": "between"}


def _stages_of(cell: str, amounts: dict[str, float], shape: LayerShape) -> tuple[Stage, ...]:
    """`A2A_EP(z), experts(y)` as stages."""
    stages = []
    for name, symbol in re.findall(r"([\w&]+)\(([^)]+)\)", cell):
        if name == "experts":
            stages.append(Stage("experts", "", shape.expert_flops(amounts[symbol] / shape.row_bytes)))
        else:
            collective, axis = name.split("_")
            stages.append(Stage(COLLECTIVES[collective], AXES[axis], amounts[symbol]))
    return tuple(stages)


@pytest.mark.parametrize("pads", [False, True], ids=["packed", "padded"])
def test_the_stages_of_the_cost_model_are_those_of_the_code(pads: bool) -> None:
    # 48 tokens, 3 experts each of 8 at f = 2: 288 slots, 144 choices; all sizes differ, so that no mistake cancels
    shape = LayerShape(48, 10, 6, 8, 3, 2.0, 1, True, pads, 2, 2, tp=2, ep=8, esp=4, num_nodes=2)
    rows = _rows(PARM, "6. The cost model and auto")
    assert [row[0] for row in rows] == list(cost.PLANS) == list(SCHEDULES)
    for name, once, chunked in rows:
        q = (shape.slots if name in NEED_SLOTS else shape.rows) * shape.row_bytes
        blm, z = shape.token_bytes, q / shape.tp
        amounts: dict[str, float] = {"BLM": blm, "BLM N_ESP": blm * shape.esp, "Q": q, "Q N_ESP": q * shape.esp}
        amounts |= {"y": z * shape.esp, "z": z}
        # 3 of 8 experts: both halves are reached but in 2 x 4 of 56 draws, and 3 of 8 single experts always
        reached, weights = 2 * (1 - 4 / 56), 4 * shape.bytes_per_element
        rows = {"z_N": reached * 24, "y_N": 3 * 24 * shape.esp}
        amounts |= {name: pytest.approx(number * shape.row_bytes) for name, number in rows.items()}
        amounts |= {f"{name}+": pytest.approx(number * (shape.row_bytes + weights)) for name, number in rows.items()}
        amounts["w"] = 3 * 24 * shape.esp * shape.row_bytes
        assert Plan(_stages_of(once, amounts, shape), _stages_of(chunked, amounts, shape)) == cost.plan(name, shape)


def test_the_constants_of_the_cost_model_are_those_of_the_code() -> None:
    rows = PARM.partition("| operation | alpha, ms |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    names = {"AlltoAll": "A2A", "AllGather": "AG", "ReduceScatter": "RS", "AllReduce": "AR"}
    found = {
        COLLECTIVES[names[name]] if name in names else name: Line(float(alpha), float(beta))
        for name, alpha, beta in cells
    }
    assert found == cost.PUBLISHED.lines
