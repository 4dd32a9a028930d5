#!/usr/bin/env python3
"""Evaluate a GPT from its checkpoint on given texts.

Perplexity of a text file, over sliding windows: a document starts from the end-of-document token, and every token
counts once, with at least --seq-length minus --stride tokens before it (fewer only at the start). Last words (as
LAMBADA has them): a JSON object a line with a text, whose last word is right where every token of it is the likeliest.

python tools/evaluate.py --load runs/gpt --text book.txt
torchrun --nproc-per-node 2 tools/evaluate.py --load runs/gpt --tensor-model-parallel-size 2 --last-words lambada.jsonl
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.training.inference import TrainedGPT, add_flags, load_trained, run_tool
from megatron_parm.training.text_scores import Span, exact_endings, sliding_windows, text_loss


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; argparse reports a wrong one and exits with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--text", type=Path, help="text file in UTF-8, one document")
    task.add_argument("--last-words", type=Path, help="file of JSON lines, each with a text")
    parser.add_argument("--seq-length", type=int, help="tokens of a window (default: that of training)")
    parser.add_argument("--stride", type=int, help="new tokens of each window (default: half of --seq-length)")
    parser.add_argument("--batch-size", type=int, default=8, help="windows of a rank at once (default: 8)")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON (default: none)")
    return parser.parse_args(argv)


def evaluate_text(flags: argparse.Namespace, trained: TrainedGPT, ctx: ParallelContext) -> dict[str, float]:
    """Loss and perplexity a token, and bits a byte. Call on all ranks."""
    length = flags.seq_length or trained.config.data.seq_length
    most = trained.model.shape.max_positions
    stride = flags.stride or max(length // 2, 1)
    if not 1 <= stride <= length <= most:
        raise ConfigError(
            f"--seq-length {length} and --stride {stride}: a window may have {most} tokens at most, as the model has "
            "positions, and a stride from 1 to the window"
        )
    text = on_all_ranks(ctx.world, lambda: _read(flags.text))
    ids = [trained.tokenizer.eod, *trained.tokenizer.encode(text)]
    found = text_loss(trained.model, sliding_windows(ids, length, stride), flags.batch_size, ctx)
    if not found.tokens:
        raise DataError(f"--text {flags.text}: it has no token")
    return {
        "tokens": found.tokens,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.total / math.log(2) / len(text.encode()),
    }


def evaluate_last_words(flags: argparse.Namespace, trained: TrainedGPT, ctx: ParallelContext) -> dict[str, float]:
    """Accuracy of last words, and their perplexity a token. Call on all ranks."""
    most = min(flags.seq_length or trained.model.shape.max_positions, trained.model.shape.max_positions)
    spans = on_all_ranks(ctx.world, lambda: read_last_words(flags.last_words, trained.tokenizer, most))
    right = exact_endings(trained.model, spans, flags.batch_size, ctx)
    loss = text_loss(trained.model, spans, flags.batch_size, ctx)
    return {"texts": len(spans), "accuracy": right / len(spans), "loss": loss.loss, "perplexity": loss.perplexity}


def read_last_words(path: Path, tokenizer: Tokenizer, most: int) -> list[Span]:
    """The texts, of which the tokens of the last word count; of a long one the last `most`. Raises DataError."""
    spans = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        text = row.get("text") if isinstance(row, dict) else None
        before, blank, word = text.rstrip().rpartition(" ") if isinstance(text, str) else ("", "", "")
        if not before.strip():
            raise DataError(f"{path} line {number}: expected a JSON object with a text of two words or more")
        context, ending = tokenizer.encode(before), tokenizer.encode(blank + word)
        kept = [tokenizer.eod, *context][-(most + 1 - len(ending)) :] if len(ending) <= most else []
        if not kept:
            raise DataError(f"{path} line {number}: the last word alone has more tokens than the model has positions")
        spans.append(Span((*kept, *ending), len(kept)))
    if not spans:
        raise DataError(f"{path}: no text was found")
    return spans


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; give a text file of UTF-8") from error


def evaluate(flags: argparse.Namespace, ctx: ParallelContext) -> dict[str, float]:
    """Load the model and print the figures from the first rank. Call on all ranks."""
    trained = load_trained(flags, ctx)
    task = evaluate_text if flags.text is not None else evaluate_last_words
    figures = task(flags, trained, ctx)
    if ctx.rank == 0:
        print(" | ".join(f"{name} {value:.6g}" for name, value in figures.items()), flush=True)
        if flags.output is not None:
            flags.output.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and return the exit code."""
    flags = parse(argv)

    def check() -> None:
        if flags.batch_size < 1:
            raise ConfigError(f"--batch-size {flags.batch_size}: must be at least 1")

    def work(ctx: ParallelContext) -> None:
        evaluate(flags, ctx)

    return run_tool(flags, check, work)


if __name__ == "__main__":
    sys.exit(main())
