"""Every refusal names a flag and says what to do. Reference: the sources of config/checks*.py, read as trees.

That what is proposed works is tried message by message in test_checks.py, test_checks_pipeline.py and their like.
"""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "megatron_parm" / "config"
REMEDY = re.compile(r"\b(use|set|add|leave|keep|give|start|change|name)\b|\bneeds? --|is required")
FLAG = re.compile(r"--[a-z{]|\{(flag|given|named|_[A-Z_]+)|\{.*chosen")  # or a value that holds one


def _text(node: ast.expr) -> str:
    """The words of a message; a value is `{}`, a value that has a name in the function the name."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return ast.unparse(node)


def _messages() -> list[tuple[str, str]]:
    found = []
    for path in sorted(FOLDER.glob("checks*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                found.append((f"{path.name}:{node.lineno}", _text(node.exc.args[0])))
    return found


MESSAGES = _messages()


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 80


@pytest.mark.parametrize("text", ["--tensor-model-parallel-size 3 must divide 4", "3 must divide 4; use 2"])
def test_a_message_without_flag_or_remedy_is_seen(text: str) -> None:
    assert not _is_complete(text)


def _is_complete(text: str) -> bool:
    return FLAG.search(text) is not None and (REMEDY.search(text) is not None or "{remedy}" in text)


def test_every_refusal_names_a_flag_and_a_way_out() -> None:
    assert [message for message in MESSAGES if not _is_complete(message[1])] == []
