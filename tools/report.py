#!/usr/bin/env python3
"""Report on a results folder of the paper's experiments, or compare two.

    python tools/report.py runs/parm_paper --html runs/parm_paper/report.html
    python tools/report.py runs/parm_paper --markdown docs/parm_results.md
    python tools/report.py runs/first runs/second

The HTML page is one file without network; its tables name the CSV files beside it. What the paper claims, what was
measured and what was predicted are three columns. Without a file to write, a summary is printed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import DataError, MegatronParmError
from tools.paper.compare import comparison
from tools.paper.figures import Figures, figures_of
from tools.paper.folder import Folder
from tools.paper.page import html, markdown, text

MOST_BYTES = 6_000_000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="one folder, or two to compare")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the whole report as one page")
    parser.add_argument("--text", type=Path, metavar="FILE", help="write the summary to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page of docs/")
    return parser.parse_args(argv)


def read(path: Path) -> Figures:
    """The figures of a folder. Raises DataError if there is no run in it."""
    folder = Folder(path)
    if not folder.facts.exists():
        raise DataError(f"{path} holds no run.json; name a folder that examples/parm_paper/run.sh wrote")
    return figures_of(folder)


def write(path: Path, content: str) -> None:
    """Write a page. Raises DataError if it grew too large to be one file."""
    if len(content.encode()) > MOST_BYTES:
        raise DataError(f"{path} would hold {len(content.encode())} bytes, more than {MOST_BYTES}; report fewer layers")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write and print what was asked for; returns the exit code."""
    flags = parse(argv)
    try:
        if len(flags.results) == 2:
            first, second = flags.results
            print("\n".join(comparison(read(first), read(second), [str(first), str(second)])))
            return 0
        if len(flags.results) > 2:
            raise DataError("two folders can be compared, not more")
        found = read(flags.results[0])
        if flags.html is not None:
            write(flags.html, html(found))
        if flags.markdown is not None:
            write(
                flags.markdown,
                markdown(found, f"python tools/report.py {flags.results[0]} --markdown {flags.markdown}"),
            )
        if flags.text is not None:
            write(flags.text, text(found) + "\n")
        if flags.html is flags.markdown is flags.text is None:
            print(text(found))
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
