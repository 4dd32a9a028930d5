"""From data flags to the train, valid and test datasets of a BERT. Floor 4."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from megatron_parm.data.bert_dataset import BertDataset
from megatron_parm.data.bert_masking import MaskingRules, WordPieces
from megatron_parm.data.build import GPTDataRules, GPTDatasets, SplitPart, build_splits
from megatron_parm.data.gpt_dataset import SampleSource
from megatron_parm.data.index_cache import IndexCache
from megatron_parm.data.indexed_dataset import IndexedDataset, TokenSource
from megatron_parm.data.sentence_map import (
    SPECIAL_TOKENS,
    DocumentCounts,
    SentenceRules,
    UsableDocuments,
    build_sentence_map,
    require_usable,
    usable_documents,
)


@dataclass(frozen=True)
class BertDataRules:
    """What only a BERT's samples have. `has_two_segments`: two in each sample, for the head that learns their order."""

    mask_probability: float
    short_probability: float
    has_two_segments: bool


@dataclass(frozen=True)
class BertSummary:
    """One source of one split. A sample is a run of whole sentences of one document."""

    split_name: str
    source: str
    counts: DocumentCounts
    samples: int
    requested: int | None

    def __str__(self) -> str:
        asked = "one epoch" if self.requested is None else f"{self.requested} asked for"
        return f"{self.split_name}: {self.source}: {self.counts}; {asked}: {self.samples} samples in whole epochs"


class BertSamples:
    """Runs of sentences of the documents of a split; see `SampleMaker`."""

    def __init__(self, rules: GPTDataRules, bert: BertDataRules, pieces: WordPieces) -> None:
        self.rules = rules
        self.bert = bert
        self.pieces = pieces
        self.sentences = SentenceRules(
            max_tokens=rules.sequence_length - SPECIAL_TOKENS,
            short_probability=bert.short_probability,
            min_sentences=2 if bert.has_two_segments else 1,
        )

    def num_units(self, source: TokenSource) -> int:
        """Documents of the source."""
        return _indexed(source).num_documents

    def samples_per_epoch(self, part: SplitPart) -> int:
        """Samples of the first epoch; the lengths that are drawn differ a little from epoch to epoch."""
        return len(self._map(part, self._usable(part), None))

    def make(self, part: SplitPart, request: int | None, cache: IndexCache) -> tuple[SampleSource, BertSummary]:
        """The dataset and its summary. Raises DataError if no document can give a sample."""
        documents = self._usable(part)
        facts = part.facts() | {
            "seed": self.rules.seed,
            "samples": request,
            "max_tokens": self.sentences.max_tokens,
            "short_ratio": self.sentences.short_ratio,
            "min_sentences": self.sentences.min_sentences,
        }
        rows = cache.get_or_build("sentences", facts, lambda: {"rows": self._map(part, documents, request)})["rows"]
        rules = MaskingRules(self.rules.sequence_length, self.bert.mask_probability, self.bert.has_two_segments)
        dataset = BertDataset(part.source, rows, rules, self.pieces, self.rules.seed)
        summary = BertSummary(part.split_name, part.source.name, documents.counts, len(rows), request)
        return cast(SampleSource, dataset), summary

    def _usable(self, part: SplitPart) -> UsableDocuments:
        index = _indexed(part.source).document_index[part.start : part.stop + 1]
        documents = usable_documents(part.source.lengths, index, self.sentences)
        require_usable(documents.counts, self.sentences, part.name)
        return documents

    def _map(
        self, part: SplitPart, documents: UsableDocuments, request: int | None
    ) -> np.ndarray[tuple[int, int], np.dtype[np.integer]]:
        lengths = part.source.lengths
        return build_sentence_map(lengths, documents, self.sentences, request, self.rules.seed)


def _indexed(source: TokenSource) -> IndexedDataset:
    assert isinstance(source, IndexedDataset), "only a corpus on disk has documents of sentences"
    return source


def build_bert_datasets(
    data_path: Sequence[str],
    requests: Sequence[int | None],
    rules: GPTDataRules,
    bert: BertDataRules,
    pieces: WordPieces,
    split: str = "969,30,1",
    paths_by_split: Sequence[Sequence[str]] = ((), (), ()),
) -> GPTDatasets:
    """Build the datasets of train, valid and test, as `build_gpt_datasets` does those of a GPT.

    Raises DataError also for a split without a usable document, as soon as its documents are counted.
    """
    return build_splits(BertSamples(rules, bert, pieces), rules, data_path, requests, split, paths_by_split)
