"""Says in numbers whether the quickstart learned something, and exits with 1 if it did not. Floor 8.

The yardsticks are ln(vocabulary), the loss of a model that knows nothing, and the unigram entropy of the validation
text, the best loss of a model that knows how frequent each token is and nothing else.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.splits import SPLIT_NAMES, parse_split, split_bounds
from megatron_parm.errors import MegatronParmError
from megatron_parm.observe.json_lines import number_of, read_run

NATS_BELOW_UNIGRAM = 0.3


def unigram_entropy(data_path: str, split: str) -> float:
    """Entropy in nats of the token frequencies of the validation documents."""
    dataset = IndexedDataset(data_path)
    start, stop = split_bounds(parse_split(split), len(dataset))[SPLIT_NAMES.index("valid")]
    counts = np.bincount(np.concatenate([dataset.read(number) for number in range(start, stop)]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def report(events: list[dict[str, Any]], vocab_size: int, entropy: float) -> tuple[list[str], bool]:
    """The lines to print, and whether the last validation loss is low enough."""
    losses = [
        (event["iteration"], number_of(event["lm_loss"]))
        for event in events
        if event["event"] == "valid" and event.get("split") == "valid"
    ]
    (first_at, first), (last_at, last) = losses[0], losses[-1]
    starts = [event for event in events if event["event"] == "start" and event["layout"]["world"] > 1]
    choice = starts[-1]["moe_schedule"]
    is_low = last <= entropy - NATS_BELOW_UNIGRAM
    lines = [
        f"validation loss {first:.3f} at iteration {first_at} (ln {vocab_size} = {math.log(vocab_size):.3f}), "
        f"{last:.3f} at iteration {last_at}",
        f"unigram entropy of the validation text {entropy:.3f}: the model is {entropy - last:.3f} nats below it "
        f"({'at least' if is_low else 'should be at least'} {NATS_BELOW_UNIGRAM})",
        f"started at iterations {', '.join(str(event['iteration']) for event in starts)}: "
        "the second start is the resume from the checkpoint of the first",
        f"MoE schedule {choice['name']}: {choice['reason']}",
    ]
    return lines, is_low


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 if the model is far enough below the unigram entropy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", required=True, help="the run's --log-json file")
    parser.add_argument("--data-path", required=True, help="prefix of the corpus")
    parser.add_argument("--split", required=True, help="as in training")
    parser.add_argument("--vocab-file", required=True, help="vocab.json")
    parser.add_argument("--entropy-only", action="store_true", help="print the unigram entropy alone")
    flags = parser.parse_args(argv)
    try:
        entropy = unigram_entropy(flags.data_path, flags.split)
        if flags.entropy_only:
            print(f"{entropy:.4f}")
            return 0
        vocab_size = len(json.loads(Path(flags.vocab_file).read_text(encoding="utf-8")))
        lines, is_low = report(read_run(flags.log).events, vocab_size, entropy)
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(lines))
    return 0 if is_low else 1


if __name__ == "__main__":
    sys.exit(main())
