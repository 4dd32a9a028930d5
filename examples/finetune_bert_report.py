#!/usr/bin/env python3
"""Prints the metrics of examples/finetune_bert_classification.sh, and fails if training the encoder did not pay."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

STARTS = ("trained", "random")


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the mean accuracy from the trained encoder is ahead by so many points, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs START-SEED")
    parser.add_argument("--seeds", type=int, required=True, help="seeds 1 to this number")
    parser.add_argument("--least-gain", type=float, required=True, help="points of accuracy to be ahead")
    flags = parser.parse_args(argv)
    means = {}
    for start in STARTS:
        found = []
        for seed in range(1, flags.seeds + 1):
            figures = json.loads((flags.folder / f"{start}-{seed}" / "metrics.json").read_text())["test"]
            found.append(figures)
            print(
                f"{start:8} seed {seed}: accuracy {figures['accuracy']:.3f} | F1 {figures['f1']:.3f} | "
                f"Matthews {figures['matthews']:.3f}"
            )
        means[start] = 100 * mean(figures["accuracy"] for figures in found)
    gain = means["trained"] - means["random"]
    print(f"mean accuracy: {means['trained']:.1f} % trained, {means['random']:.1f} % random: {gain:+.1f} points")
    return 0 if gain >= flags.least_gain else 1


if __name__ == "__main__":
    sys.exit(main())
