"""From data flags to the train, valid and test datasets of a GPT, with a report of what they hold. Floor 4."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_parm.data.blend import (
    BlendedDataset,
    BlendIndex,
    BlendPlan,
    blend_index,
    blend_requests,
    exhaustive_blend_index,
    parse_data_path,
)
from megatron_parm.data.gpt_dataset import DocumentRules, GPTDataset, SampleSource
from megatron_parm.data.index_cache import IndexCache, default_cache_folder, file_facts
from megatron_parm.data.indexed_dataset import IndexedDataset, TokenSource
from megatron_parm.data.mock import MockDocuments
from megatron_parm.data.splits import SPLIT_NAMES, Rounding, parse_split, require_sequences, split_bounds
from megatron_parm.data.token_index import EpochPlan, TokenIndex, build_token_index, plan_epochs
from megatron_parm.data.vocabulary_check import check_token_ids
from megatron_parm.errors import ConfigError

MOCK = "<mock data>"


@dataclass(frozen=True)
class GPTDataRules:
    """What all splits share. `vocab_size` is unpadded; without `data_cache_path` indices lie beside the data.

    maps_tokens: read the `.bin` through a memory map; otherwise with plain reads (--no-mmap-bin-files).
    """

    sequence_length: int
    seed: int
    vocab_size: int
    documents: DocumentRules
    split_rounding: Rounding = "core"
    data_cache_path: str | Path | None = None
    maps_tokens: bool = True


@dataclass(frozen=True)
class SplitSummary:
    """One source of one split. A sample is a window of sequence_length tokens, not a document."""

    split_name: str
    source: str
    documents: int
    tokens: int
    plan: EpochPlan

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"{self.split_name}: {self.source}: {self.documents} documents, {self.tokens} tokens; "
            f"{plan.samples_per_epoch} samples of {plan.sequence_length} tokens per epoch; {plan.requested} asked for: "
            f"{plan.epochs} epoch{'s' if plan.epochs > 1 else ''}, {plan.total_samples} samples"
        )


@dataclass(frozen=True)
class SplitPart:
    """The units [start, stop) of one source, which are those of one split: sequences of a GPT, documents of a BERT."""

    prefix: str
    source: TokenSource
    split_name: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The part in the user's words."""
        return f"the {self.split_name} split of {self.source.name}"

    def facts(self) -> dict[str, object]:
        """What an index of this part depends on, for the cache."""
        files = {"prefix": MOCK} if self.prefix == MOCK else file_facts(self.prefix)
        return {"range": [self.start, self.stop], **files}


class SampleMaker(Protocol):
    """What a kind of model makes of a split."""

    def num_units(self, source: TokenSource) -> int:
        """Of what --split gives parts."""

    def samples_per_epoch(self, part: SplitPart) -> int:
        """Samples of one pass over the part."""

    def make(self, part: SplitPart, request: int | None, cache: IndexCache) -> tuple[SampleSource, object]:
        """The dataset with at least `request` samples (None: one epoch), and a summary that prints in one line."""


@dataclass(frozen=True)
class GPTDatasets:
    """The datasets of the splits that samples were asked of, one summary per source and split, and what to tell."""

    train: SampleSource | None
    valid: SampleSource | None
    test: SampleSource | None
    summaries: tuple[object, ...]
    notes: tuple[str, ...] = ()


def split_requests(
    global_batch_size: int, eval_interval: int, eval_iters: int, train_iters: int | None, train_samples: int | None
) -> tuple[int, int, int]:
    """Samples that a run takes of train, valid and test: one evaluation each interval and one at the end.

    The same numbers whether the run's length is given in iterations or in samples.
    """
    train = train_samples if train_samples is not None else (train_iters or 0) * global_batch_size
    evaluations = train // global_batch_size // eval_interval + 1
    return train, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size


def build_gpt_datasets(
    data_path: Sequence[str],
    requests: Sequence[int | None],
    rules: GPTDataRules,
    split: str = "969,30,1",
    paths_by_split: Sequence[Sequence[str]] = ((), (), ()),
    mock_data: bool = False,
) -> GPTDatasets:
    """Build the datasets of train, valid and test; every process gets the same.

    `requests` are samples per split: 0 builds none, None gives one epoch. `data_path` (--data-path) is cut by `split`;
    instead `paths_by_split` may give --train-data-path, --valid-data-path and --test-data-path, each taken whole; a
    held-out split without a path of its own has no dataset, and a note says so.
    Raises ConfigError for flags that do not fit together and an empty split, DataError for a damaged file, a token id
    outside the vocabulary, and data too short for one sample.
    """
    return build_splits(GPTSamples(rules), rules, data_path, requests, split, paths_by_split, mock_data)


def build_splits(
    samples: SampleMaker,
    rules: GPTDataRules,
    data_path: Sequence[str],
    requests: Sequence[int | None],
    split: str,
    paths_by_split: Sequence[Sequence[str]] = ((), (), ()),
    mock_data: bool = False,
) -> GPTDatasets:
    """Train, valid and test of the samples that `samples` makes; everything else as `build_gpt_datasets`."""
    _check_paths(data_path, paths_by_split, mock_data)
    builder = _Builder(rules, samples)
    built: list[SampleSource | None] = [None, None, None]
    notes = []
    for number, name in enumerate(SPLIT_NAMES):
        if requests[number] == 0:
            continue
        if mock_data:
            built[number] = builder.single(MOCK, split, number, requests[number])
            continue
        whole = ",".join("1" if place == number else "0" for place in range(len(SPLIT_NAMES)))
        flag, values, cut = ("--data-path", data_path, split)
        if not data_path:
            if number and not paths_by_split[number]:
                notes.append(f"no --{name}-data-path is given: there is no evaluation on a {name} split")
                continue
            flag, values, cut = f"--{name}-data-path", paths_by_split[number], whole
        built[number] = builder.blended(parse_data_path(values, flag), cut, number, requests[number])
    return GPTDatasets(built[0], built[1], built[2], tuple(builder.summaries), tuple(notes))


class GPTSamples:
    """Windows of the joined sequences of a split; see `SampleMaker`."""

    def __init__(self, rules: GPTDataRules) -> None:
        self.rules = rules

    def num_units(self, source: TokenSource) -> int:
        """Sequences of the source."""
        return len(source.lengths)

    def samples_per_epoch(self, part: SplitPart) -> int:
        """Windows of the part."""
        return plan_epochs(self._tokens(part), self.rules.sequence_length, None, part.name).samples_per_epoch

    def make(self, part: SplitPart, request: int | None, cache: IndexCache) -> tuple[SampleSource, SplitSummary]:
        """The dataset and its summary; the indices come from the cache or go into it."""
        length, seed = self.rules.sequence_length, self.rules.seed
        tokens = self._tokens(part)
        plan = plan_epochs(tokens, length, request, part.name)
        facts = part.facts() | {"sequence_length": length, "seed": seed, "samples": plan.requested}
        lengths, sequences = part.source.lengths, np.arange(part.start, part.stop)
        arrays = cache.get_or_build(
            "tokens", facts, lambda: dict(vars(build_token_index(lengths, sequences, plan, seed)))
        )
        index = TokenIndex(arrays["document"], arrays["sample"], arrays["shuffle"])
        summary = SplitSummary(part.split_name, part.source.name, part.stop - part.start, tokens, plan)
        return GPTDataset(part.source, index, length, self.rules.documents), summary

    def _tokens(self, part: SplitPart) -> int:
        return int(part.source.lengths[part.start : part.stop].sum(dtype=np.int64))


class _Builder:
    """Opens each source once and notes what every dataset holds."""

    def __init__(self, rules: GPTDataRules, samples: SampleMaker) -> None:
        self.rules = rules
        self.samples = samples
        self.summaries: list[object] = []
        self._opened: dict[str, TokenSource] = {}

    def blended(self, plan: BlendPlan, split: str, number: int, request: int | None) -> SampleSource:
        """The dataset of one split of a plan; a lone prefix without a weight is no blend."""
        if plan.weights is None and len(plan.prefixes) == 1:
            return self.single(plan.prefixes[0], split, number, request)
        if request is None:
            whole = [self.single(prefix, split, number, None) for prefix in plan.prefixes]
            return BlendedDataset(whole, plan.prefixes, exhaustive_blend_index([len(dataset) for dataset in whole]))
        weights = plan.weights or self._size_weights(plan.prefixes, split, number)
        shares, asked = blend_requests(weights, request)
        datasets = [
            self.single(prefix, split, number, count) for prefix, count in zip(plan.prefixes, asked, strict=True)
        ]
        facts = {"weights": list(weights), "samples": sum(shares)}
        arrays = self._cache(plan.prefixes[0]).get_or_build(
            "blend", facts, lambda: dict(vars(blend_index(weights, sum(shares))))
        )
        return BlendedDataset(datasets, plan.prefixes, BlendIndex(arrays["dataset"], arrays["sample"]))

    def single(self, prefix: str, split: str, number: int, request: int | None) -> SampleSource:
        """The dataset of one split of one source."""
        dataset, summary = self.samples.make(self._part(prefix, split, number), request, self._cache(prefix))
        self.summaries.append(summary)
        return dataset

    def _part(self, prefix: str, split: str, number: int) -> SplitPart:
        source = self._open(prefix)
        count = self.samples.num_units(source)
        bounds = split_bounds(parse_split(split), count, self.rules.split_rounding)[number]
        require_sequences(bounds, SPLIT_NAMES[number], split, source.name, count)
        return SplitPart(prefix, source, SPLIT_NAMES[number], *bounds)

    def _open(self, prefix: str) -> TokenSource:
        if prefix not in self._opened:
            if prefix == MOCK:
                eod = self.rules.documents.eod
                self._opened[prefix] = MockDocuments(self.rules.vocab_size, 0 if eod is None else eod)
            else:
                dataset = IndexedDataset(prefix, maps_tokens=self.rules.maps_tokens)
                check_token_ids(dataset, self.rules.vocab_size, self._cache(prefix))
                self._opened[prefix] = dataset
        return self._opened[prefix]

    def _size_weights(self, prefixes: Sequence[str], split: str, number: int) -> tuple[float, ...]:
        """Weights in proportion to the samples of one epoch."""
        sizes = [self.samples.samples_per_epoch(self._part(prefix, split, number)) for prefix in prefixes]
        return tuple(size / sum(sizes) for size in sizes)

    def _cache(self, prefix: str) -> IndexCache:
        if self.rules.data_cache_path is not None:
            return IndexCache(Path(self.rules.data_cache_path))
        return IndexCache(None if prefix == MOCK else default_cache_folder(prefix))


def _check_paths(data_path: Sequence[str], paths_by_split: Sequence[Sequence[str]], mock_data: bool) -> None:
    given = [flag for flag, values in (("--data-path", data_path), ("--mock-data", mock_data)) if values]
    if any(paths_by_split):
        given.append(" / ".join(f"--{name}-data-path" for name in SPLIT_NAMES))
    if not given:
        raise ConfigError("no data is given: use --data-path PREFIX, or --mock-data to train on made-up numbers")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given together; use one of them")
