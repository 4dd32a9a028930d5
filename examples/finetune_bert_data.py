#!/usr/bin/env python3
"""Writes the task of examples/finetune_bert_classification.sh: which of six functional groups does a reaction change?

Reactions are made up: a small scaffold carries two groups, one of them changes as in a well-known reaction, the
other stays (and may be a group that could have changed, or the product of such a change). A line is
`reactants > product` in SMILES with a space between its symbols. The answer needs both sides compared; no single
symbol tells it. Scaffolds of training and test are the same, combinations are not: no reaction occurs twice.
"""

import argparse
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

SCAFFOLDS = (
    "c1({0})cc({1})ccc1",
    "c1({0})ccc({1})cc1",
    "C({0})CCC({1})",
    "N1(CC({0}))CCC({1})C1",
    "c1({0})cnc({1})cc1",
    "C1({0})CCC({1})C1",
)
# name -> (before, after): hydrolysis, reduction, substitution, hydration, removal of Boc, amide
CHANGES = {
    "ester": ("C(=O)OCC", "C(=O)O"),
    "ketone": ("C(C)=O", "C(C)O"),
    "alcohol": ("CO", "CBr"),
    "nitrile": ("C#N", "C(N)=O"),
    "carbamate": ("NC(=O)OC(C)(C)C", "N"),
    "acid": ("C(=O)O", "C(=O)NC"),
}
OTHERS = ("F", "Cl", "C", "CC", "C(F)(F)F", "OC")
SYMBOL = re.compile(r"Cl|Br|.")


def spaced(smiles: str) -> str:
    """With a space between symbols."""
    return " ".join(SYMBOL.findall(smiles))


def reaction(draw: random.Random) -> tuple[str, str]:
    """(class, text) of one reaction."""
    name = draw.choice(tuple(CHANGES))
    before, after = CHANGES[name]
    pool = [part for change in CHANGES.values() for part in change] + list(OTHERS)
    groups = [draw.choice(pool) for _ in range(2)]
    place = draw.randrange(2)
    scaffold = draw.choice(SCAFFOLDS)
    left, right = list(groups), list(groups)
    left[place], right[place] = before, after
    return name, f"{spaced(scaffold.format(*left))} > {spaced(scaffold.format(*right))}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write train.tsv and test.tsv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for train.tsv, test.tsv and vocab.txt")
    parser.add_argument("--train", type=int, default=240, help="reactions to train on (default: 240)")
    parser.add_argument("--test", type=int, default=240, help="reactions to measure on (default: 240)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draws (default: 1)")
    parser.add_argument("--vocabulary", type=Path, help="vocab.txt whose >> is to be written > (default: none)")
    flags = parser.parse_args(argv)
    draw = random.Random(flags.seed)
    rows: dict[str, str] = {}
    while len(rows) < flags.train + flags.test:
        name, text = reaction(draw)
        rows.setdefault(text, name)
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}\t{text}" for text, name in rows.items()]
    for file, part in (("train.tsv", lines[: flags.train]), ("test.tsv", lines[flags.train :])):
        (flags.output_dir / file).write_text("\n".join(["label\ttext", *part]) + "\n", encoding="utf-8")
    if flags.vocabulary is not None:
        words = flags.vocabulary.read_text(encoding="utf-8").splitlines()
        text = "\n".join(">" if word == ">>" else word for word in words) + "\n"
        (flags.output_dir / "vocab.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
