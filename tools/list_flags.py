"""List every flag of a training run, and what becomes of each Megatron name that is not one of ours. Floor 8.

python tools/list_flags.py                                 one flag a line, to search with grep
python tools/list_flags.py --markdown > docs/flags.md      the page in docs/
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.config.fields import Flag, flags_of
from megatron_parm.config.megatron_flags import MEGATRON_FLAGS, Ignored, Refused, Sets, Spelling
from megatron_parm.config.run import SECTIONS

HEAD = """\
# Every flag of a training run

Made by `python tools/list_flags.py --markdown > docs/flags.md` from the settings classes in `megatron_parm/config/`; a
test compares the two. `pretrain_gpt.py --help` and `pretrain_bert.py --help` print them, the table of BERT only the
latter: a GPT that is given one of its flags refuses it. Beside these, `--config FILE` reads flags from a YAML file
(flags on the command line win), and `--version` prints the version.
"""
IGNORED = """\
## Accepted and ignored

Results do not depend on these names of Megatron and DeepSpeed; a run that is given one says so once and goes on.
"""
REFUSED = """\
## Refused

A run that is given one of these stops with exit code 2 and the reason. Where a value is named, that value means "off"
and is accepted. A flag that stands in none of the tables is an error too, which names the nearest known flag.
"""


@dataclass(frozen=True)
class Row:
    """One known name: a field's own flag, or a name of Megatron or DeepSpeed."""

    name: str
    fate: str  # the settings class's title for a field's own flag; "ignored" or "refused"
    text: str
    default: str = ""
    others: str = ""


def field_rows(owner: type) -> Iterator[Row]:
    """The flags of a settings class, in its order."""
    for flag in flags_of(owner):
        text, _, default = flag.help_line().rpartition(" (")  # a help line ends with the default in parentheses
        if flag.about.refused:
            text += f"; refused, with the reason: {', '.join(flag.about.refused)}"
        yield Row(flag.spelling, title_of(owner), text, default.removesuffix(")"), ", ".join(other_names(flag)))


def title_of(owner: type) -> str:
    """The first sentence of a settings class."""
    return (owner.__doc__ or "").split(".")[0]


def other_names(flag: Flag) -> Iterator[str]:
    """Other spellings of a flag, and the switches that set it."""
    for name, entry in MEGATRON_FLAGS.items():
        if isinstance(entry, Spelling) and entry.field == flag.field:
            yield name
        elif isinstance(entry, Sets) and entry.field == flag.field:
            yield f"{name} (sets {'the default' if entry.value is None else entry.value})"


def table_rows(kind: type[Ignored] | type[Refused]) -> Iterator[Row]:
    """The names of Megatron and DeepSpeed that are ignored, or refused, in alphabetical order."""
    for name, entry in sorted(MEGATRON_FLAGS.items(), key=lambda item: item[0].lower()):
        if isinstance(entry, Refused) and kind is Refused:
            yield Row(name, "refused", entry.reason, others=", ".join(entry.harmless))
        elif isinstance(entry, Ignored) and kind is Ignored:
            yield Row(name, "ignored", entry.instead)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown() -> str:
    """The page in docs/."""
    parts = [HEAD]
    for owner in SECTIONS.values():
        rows = [(f"`{row.name}`", row.text, row.default, row.others) for row in field_rows(owner)]
        parts.append(f"## {title_of(owner)}\n\n" + _table(("flag", "meaning", "default", "other names"), rows))
    ignored = [(f"`{row.name}`", row.text) for row in table_rows(Ignored)]
    refused = [(f"`{row.name}`", row.text, row.others) for row in table_rows(Refused)]
    parts.append(IGNORED + "\n" + _table(("flag", "what happens instead"), ignored))
    parts.append(REFUSED + "\n" + _table(("flag", "reason and remedy", "accepted value"), refused))
    return "\n".join(parts)


def plain() -> str:
    """One line a name: the name, its fate, what it means."""
    rows = [row for owner in SECTIONS.values() for row in field_rows(owner)]
    rows += [*table_rows(Ignored), *table_rows(Refused)]
    lines = []
    for row in rows:
        default = f" ({row.default})" if row.default else ""
        others = f"; {'accepted: ' if row.fate == 'refused' else 'also '}{row.others}" if row.others else ""
        lines.append(f"{row.name}  [{row.fate}] {row.text}{default}{others}\n")
    return "".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the page in docs/ instead of plain lines")
    args = parser.parse_args(argv)
    print(markdown() if args.markdown else plain(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
