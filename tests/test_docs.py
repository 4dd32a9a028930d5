"""What sources cite is there: sections of docs/formats.md and docs/parm.md, numbers and tests of docs/field-cases.md.

Reference: the headings and tables of those pages, and the definitions of the test files, read and never run.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FORMATS, PARM, FIELD_CASES = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("formats.md", "parm.md", "field-cases.md")
)
FOLDERS = ("megatron_parm", "tools", "tests", "examples")
SOURCES = [
    path
    for path in (*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")))
    if path.suffix in (".py", ".sh") and path != Path(__file__)
]
NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CASE = re.compile(r"\bFC-\w+")
SECTION = re.compile(r"\b[A-Z]\.\d+\b")
# "parm.md section 5", "sections 2, 3 and 6", "sections 1 to 3", also where the line breaks
PARM_SECTIONS = re.compile(r"parm\.md(?:,|'s)?\s+sections?\s+(\d+(?:(?:,|\s+and|\s+to)\s+\d+)*)")
NOWHERE = re.compile(
    r"\b(?:[Ff]ormats?|[Aa]rguments) page\b|\b[Ff]aults? rows?\b|\b[Ff]ield case \d|\bDESIGN\b|\bSTYLE\b"
)


@cache
def _table_cases() -> list[str]:
    """The cases that have a row."""
    return re.findall(r"^\| (FC-\d\d) \|", FIELD_CASES, re.M)


def _dead_citations(text: str) -> Iterator[str]:
    """Every citation of `text` that leads nowhere."""
    yield from (found for found in SECTION.findall(text) if f"\n## {found} " not in FORMATS)
    yield from (found for found in CASE.findall(text) if found not in _table_cases())
    for numbers in PARM_SECTIONS.findall(text):
        yield from (f"parm.md {number}" for number in re.findall(r"\d+", numbers) if f"\n## {number}. " not in PARM)
    yield from (found for found in re.findall(r"\bdocs/[\w-]+\.\w+", text) if not (ROOT / found).is_file())
    yield from NOWHERE.findall(text)


@cache
def _definitions(path: str) -> frozenset[str]:
    """The tests that pytest would find in a file: its functions at the top level."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_citation_leads_to_a_page() -> None:
    dead = {
        f"{path.relative_to(ROOT)}: {found}"
        for path in SOURCES
        for found in _dead_citations(path.read_text(encoding="utf-8"))
    }
    assert dead == set()


def test_citations_of_every_kind_are_found() -> None:
    """Else the test above could pass by seeing nothing."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert {"C.1", "C.2", "C.3", "C.4", "C.5", "C.6", "C.7", "C.8"} == set(SECTION.findall(text))
    assert len(set(CASE.findall(text))) > 30
    assert {int(number) for run in PARM_SECTIONS.findall(text) for number in re.findall(r"\d+", run)} >= {1, 2, 3, 5, 6}


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("Source: formats C.9.", ["C.9"]),
        ("the defaults, B.8", ["B.8"]),
        ("FC-99 and FC-7", ["FC-99", "FC-7"]),
        ("Source: parm.md\nsections 2, 3 and 8.", ["parm.md 8"]),
        ("docs/parm.md, section 9", ["parm.md 9"]),
        ("see docs/nowhere.md", ["docs/nowhere.md"]),
        ("formats page C.2", ["formats page"]),
        ("Faults row 12: weights", ["Faults row"]),
    ],
)
def test_a_dead_citation_would_be_seen(text: str, dead: list[str]) -> None:
    assert list(_dead_citations(text)) == dead


@pytest.mark.parametrize("name", ["formats.md", "field-cases.md", "parm.md"])
def test_every_test_that_a_page_names_is_there(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    named = NODE.findall(text)
    assert len(named) == text.count("::"), "a test is written in another form"
    assert [f"{path}::{test}" for path, test in named if test not in _definitions(path)] == []
    assert all(test.startswith("test_") for _, test in named)


def test_every_field_case_has_one_place_and_every_row_a_test() -> None:
    not_yet = re.findall(r"FC-\d\d", FIELD_CASES.partition("\nNot yet: ")[2])
    assert sorted(_table_cases() + not_yet) == [f"FC-{number:02d}" for number in range(1, 43)]
    rows = [line for line in FIELD_CASES.splitlines() if line.startswith("| FC-")]
    assert [row for row in rows if not NODE.search(row)] == []
    assert [row for row in rows if not re.search(r"\([\w.-]+/[\w.-]+#\d+", row)] == [], "the public source is missing"
