"""The results folder of the paper's experiments: what each stage leaves there, as CSV and JSON lines."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_parm.errors import DataError


@dataclass(frozen=True)
class Folder:
    """The files of one run."""

    root: Path

    @property
    def facts(self) -> Path:
        """Cluster, machine, versions, commit, date of every start."""
        return self.root / "run.json"

    @property
    def cost_model(self) -> Path:
        """Measured cost models, by cluster and layout."""
        return self.root / "cluster.json"

    @property
    def layers(self) -> Path:
        """Measured layers, one a line."""
        return self.root / "layers.jsonl"

    @property
    def models(self) -> Path:
        """Whole models, one run a line."""
        return self.root / "models.jsonl"

    def table(self, name: str) -> Path:
        """A CSV file."""
        return self.root / f"{name}.csv"

    def peers(self) -> list[Path]:
        """Comparisons with the peers."""
        return sorted(self.root.glob("peers-*.json"))


def read_json(path: Path) -> Any:
    """A JSON file, None if it is not there. Raises DataError if it is damaged."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; delete it to have it made anew") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSON lines file; a line that a killed run tore is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """One line more; a torn last line is ended first."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(dict(row)) + "\n")


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A CSV file with the names of the first row, in one rename."""
    found = list(rows)
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]) if found else ["nothing"])
        writer.writeheader()
        writer.writerows(found)
    draft.replace(path)


def read_table(path: Path) -> list[dict[str, str]]:
    """A CSV file, no rows if it is not there."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: Sequence[Mapping[str, str]], name: str) -> list[float]:
    """A column without its empty cells."""
    return [float(row[name]) for row in rows if row.get(name)]
