"""Time the document, sample and shuffle indices of a GPT on made-up document lengths, and print their memory. Floor 8.

    python tools/bench_token_index.py
    python tools/bench_token_index.py --documents 100000000 --epochs 2

CPU seconds of this process, and how far its peak of resident memory rose above what the lengths themselves take.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.data.token_index import build_token_index, plan_epochs
from megatron_parm.errors import ConfigError

MIB = 1 << 20


def peak_mib() -> float:
    """The most resident memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000, metavar="N", help="default: 10 million")
    parser.add_argument("--longest", type=int, default=1200, metavar="TOKENS", help="of 1 to so many (default: 1200)")
    parser.add_argument("--seq-length", type=int, default=1024, metavar="N", help="default: 1024")
    parser.add_argument("--epochs", type=float, default=1.0, metavar="N", help="samples to ask for (default: 1)")
    flags = parser.parse_args(argv)
    for name in ("documents", "longest", "seq_length", "epochs"):
        value = getattr(flags, name)
        if not value > 0:
            error = ConfigError(f"--{name.replace('_', '-')} {value} must be above 0")
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
    lengths = np.random.RandomState(1).randint(1, flags.longest + 1, flags.documents, dtype=np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    requested = max(1, int(flags.epochs * tokens / flags.seq_length) - 1)
    sequences = np.arange(flags.documents, dtype=np.int32)
    before, started = peak_mib(), time.process_time()
    plan = plan_epochs(tokens, flags.seq_length, requested, "made-up documents")
    index = build_token_index(lengths, sequences, plan, seed=1234)
    seconds = time.process_time() - started
    plural = "s" if plan.epochs > 1 else ""
    print(
        f"{flags.documents} documents, {tokens} tokens, {plan.epochs} epoch{plural}: {len(index)} samples in "
        f"{seconds:.2f} s of CPU; {peak_mib() - before:.0f} MiB of memory at most, {peak_mib():.0f} MiB with the "
        "process and the lengths"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
