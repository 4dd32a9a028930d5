"""From files of conversations (--sft) to train, valid and test datasets. Floor 4."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_parm.data.build import GPTDataRules, GPTDatasets
from megatron_parm.data.gpt_dataset import SampleSource
from megatron_parm.data.index_cache import Arrays, IndexCache
from megatron_parm.data.sft_chat import PROMPT_FORMATS, conversations_of, encode_conversation
from megatron_parm.data.sft_pack import Conversations, PackedConversations
from megatron_parm.data.splits import SPLIT_NAMES, parse_split, require_sequences, split_bounds
from megatron_parm.data.text_chunks import BrokenLine, BrokenTextError, find_chunks, json_object, read_documents
from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.base import Tokenizer

_CHUNK_BYTES = 1 << 20
_PROBE = "Hello, W\u00f6rld! 42"


@dataclass(frozen=True)
class SFTSummary:
    """One split: what it holds, and how well it packs."""

    split_name: str
    source: str
    conversations: int
    tokens: int
    answer_tokens: int
    cut: int
    packs: int
    sequence_length: int
    requested: int

    def __str__(self) -> str:
        filled = 100 * self.tokens / max(self.packs * self.sequence_length, 1)
        return (
            f"{self.split_name}: {self.source}: {self.conversations} conversations ({self.cut} cut to "
            f"{self.sequence_length} tokens), {self.tokens} tokens, {self.answer_tokens} of them answers; "
            f"{self.packs} samples an epoch, {filled:.0f} % full; {self.requested} samples asked for"
        )


def build_sft_datasets(
    data_path: Sequence[str],
    paths_by_split: Sequence[Sequence[str]],
    requests: Sequence[int | None],
    rules: GPTDataRules,
    split: str,
    tokenizer: Tokenizer,
    prompt_format: str,
) -> GPTDatasets:
    """Build the datasets; every process gets the same. The encoded conversations are kept in the index cache.

    `data_path` are files of JSON lines (.gz and .zst too), cut by `split`; or `paths_by_split`, each taken whole.
    Raises DataError naming file, line and reason for a line that is no conversation, ConfigError for an empty split.
    """
    built: list[SampleSource | None] = [None, None, None]
    summaries: list[SFTSummary] = []
    for number, name in enumerate(SPLIT_NAMES):
        paths = data_path or paths_by_split[number]
        if requests[number] == 0 or not paths:
            continue
        source = " ".join(paths)
        files = [Path(path) for path in paths]
        conversations = _conversations(files, rules, tokenizer, prompt_format)
        bounds = (0, len(conversations))
        if data_path:
            bounds = split_bounds(parse_split(split), len(conversations), rules.split_rounding)[number]
        require_sequences(bounds, name, split, source, len(conversations))
        length = rules.sequence_length
        dataset = PackedConversations(
            conversations, range(*bounds), length, tokenizer.eod, requests[number], rules.seed + number
        )
        built[number] = dataset
        summaries.append(_summary(name, source, conversations, bounds, dataset))
    return GPTDatasets(built[0], built[1], built[2], tuple(summaries))


def _summary(
    name: str, source: str, conversations: Conversations, bounds: tuple[int, int], dataset: PackedConversations
) -> SFTSummary:
    length = dataset.sequence_length
    starts = conversations.starts[bounds[0] : bounds[1] + 1]
    places = np.diff(starts) - 1
    answers = sum(int(conversations.pairs(number, length)[2].sum()) for number in range(*bounds))
    return SFTSummary(
        split_name=name,
        source=source,
        conversations=bounds[1] - bounds[0],
        tokens=int(np.minimum(places, length).sum()),
        answer_tokens=answers,
        cut=int(np.count_nonzero(places > length)),
        packs=len(dataset.packs),
        sequence_length=length,
        requested=len(dataset),
    )


def _conversations(
    files: Sequence[Path], rules: GPTDataRules, tokenizer: Tokenizer, prompt_format: str
) -> Conversations:
    """The conversations of all files, encoded by one process of those that share the cache."""
    for path in files:
        if not path.is_file():
            raise ConfigError(f"--data-path {path}: with --sft it must be a file of JSON lines; there is no such file")
    stats = [path.stat() for path in files]
    facts = {
        "files": [
            [str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in zip(files, stats, strict=True)
        ],
        "tokenizer": [tokenizer.name, tokenizer.vocab_size, tokenizer.eod, _probe(tokenizer)],
        "prompt_format": prompt_format,
    }
    folder = Path(rules.data_cache_path) if rules.data_cache_path is not None else files[0].parent / "cache"
    arrays = IndexCache(folder).get_or_build("sft", facts, lambda: _encode(files, tokenizer, prompt_format))
    return Conversations(arrays["ids"], arrays["is_answer"], arrays["starts"])


def _probe(tokenizer: Tokenizer) -> list[int]:
    try:
        return tokenizer.encode_part(_PROBE)
    except DataError:  # a tokenizer that does not take every text
        return []


def _encode(files: Sequence[Path], tokenizer: Tokenizer, prompt_format: str) -> Arrays:
    form = PROMPT_FORMATS[prompt_format]
    ids: list[np.ndarray] = []
    is_answer: list[np.ndarray] = []
    for path in files:
        for chunk in find_chunks(path, True, _CHUNK_BYTES):
            if chunk.is_too_long:
                raise DataError(
                    f"{path} line {chunk.first_line}: a line of {chunk.size} bytes, more than 8 MiB; cut it"
                )
            for line, document in read_documents(chunk):
                try:
                    for conversation in conversations_of(json_object(document.decode("utf-8"))):
                        encoded = encode_conversation(conversation, tokenizer, form)
                        ids.append(encoded.ids)
                        is_answer.append(encoded.is_answer.astype(np.uint8))
                except UnicodeDecodeError as error:
                    raise DataError(f"{BrokenLine(path, line, 'not UTF-8')}; correct it") from error
                except DataError as error:
                    reason = error.reason if isinstance(error, BrokenTextError) else str(error)
                    raise DataError(f"{BrokenLine(path, line, reason)}; correct it") from error
    if not ids:
        raise DataError(f"--data-path {' '.join(map(str, files))}: no conversation was found")
    return {
        "ids": np.concatenate(ids),
        "is_answer": np.concatenate(is_answer),
        "starts": np.concatenate([[0], np.cumsum([len(part) for part in ids], dtype=np.int64)]),
    }
