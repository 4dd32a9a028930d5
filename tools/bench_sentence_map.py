"""Time BERT's sentence map on made-up sentence lengths, and print the figure. Floor 8.

    python tools/bench_sentence_map.py
    python tools/bench_sentence_map.py --sentences 100000000 --epochs 2

CPU seconds of this process, best of the repeats; compiling the two loops is told apart.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.data.sentence_map import SentenceRules, build_sentence_map, usable_documents
from megatron_parm.errors import ConfigError, MegatronParmError


def corpus(sentences: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Lengths of 5 to 59 tokens, and documents of 1 to 39 sentences."""
    random = np.random.RandomState(0)
    lengths = random.randint(5, 60, sentences).astype(np.int32)
    ends = np.cumsum(random.randint(1, 40, sentences // 15 + 2))
    return lengths, np.concatenate([[0], ends[ends < sentences], [sentences]])


def timed(lengths: NDArray[np.int32], documents: NDArray[np.int64], rules: SentenceRules, epochs: int) -> float:
    """CPU seconds of one map."""
    start = time.process_time()
    usable = usable_documents(lengths, documents, rules)
    rows = build_sentence_map(lengths, usable, rules, None, 1234)
    if epochs > 1:
        build_sentence_map(lengths, usable, rules, (epochs - 1) * len(rows), 1234)
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=10_000_000, metavar="N", help="default: 10 million")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--seq-length", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: 3")
    flags = parser.parse_args(argv)
    try:
        for name, least in (("sentences", 100), ("epochs", 1), ("seq_length", 5), ("repeats", 1)):
            value = getattr(flags, name)
            if value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least {least}")
        rules = SentenceRules(flags.seq_length - 3, 0.1, 2)
        compiling = timed(*corpus(100), rules, 1)
        lengths, documents = corpus(flags.sentences)
        best = min(timed(lengths, documents, rules, flags.epochs) for _ in range(flags.repeats))
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"{flags.sentences} sentences in {len(documents) - 1} documents, {flags.epochs} epoch"
        f"{'s' if flags.epochs > 1 else ''}: {best:.2f} s of CPU, {flags.sentences * flags.epochs / best / 1e6:.1f} "
        f"million sentences a second (compiling: {compiling:.2f} s, once)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
