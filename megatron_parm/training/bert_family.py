"""BERT as a kind of model: what it reads, and its two losses. Floor 7."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megatron_parm.config.run import RunConfig
from megatron_parm.data.batches import Batch
from megatron_parm.data.bert_build import BertDataRules, build_bert_datasets
from megatron_parm.data.bert_dataset import SpecialIds, word_pieces
from megatron_parm.data.build import GPTDatasets
from megatron_parm.data.gpt_dataset import DocumentRules
from megatron_parm.errors import ConfigError
from megatron_parm.models.bert import BertOutput
from megatron_parm.models.build import build_bert
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.tokenizers.wordpiece import WordPieceTokenizer
from megatron_parm.training.family import ModelFamily, data_paths, data_rules
from megatron_parm.training.objective import Objective


def bert_datasets(config: RunConfig, tokenizer: Tokenizer, vocab_size: int, requests: Sequence[int]) -> GPTDatasets:
    """The datasets of a BERT; see `DatasetBuilder`."""
    data, bert = config.data, config.bert
    assert bert is not None, "these are the settings of a GPT"
    if not isinstance(tokenizer, WordPieceTokenizer):
        raise ConfigError(f"{tokenizer.name} has no word pieces, which a BERT masks; use BertWordPieceLowerCase")
    special = SpecialIds(tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad)
    paths = data_paths(config)
    return build_bert_datasets(
        paths.whole,
        requests,
        data_rules(config, vocab_size, DocumentRules()),
        BertDataRules(bert.mask_prob, bert.short_seq_prob, has_two_segments=not bert.bert_no_binary_head),
        word_pieces(special, tokenizer.pieces[:vocab_size]),
        data.split,
        paths.by_split,
    )


def _loss_sums(model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    """Of the masked words, and of the order of the segments where the model has a head for it: [2] or [1]."""
    columns = cast("dict[str, Tensor]", batch)
    padding_mask = columns["padding_mask"]
    output = model(
        columns["text"] if hidden is None else hidden,
        padding_mask,
        columns["types"] * padding_mask,  # padding's own type is the padding id, which may have no row
        columns["labels"],
        columns["is_random"],
    )
    if not isinstance(output, BertOutput):
        assert isinstance(output, Tensor)
        return output  # [s, b, h], of a stage that is not the last
    words = (output.words * columns["loss_mask"].to(output.words.dtype)).sum()
    return torch.stack([words] if output.order is None else [words, output.order.sum()])


def _masked_words(batch: Batch) -> Tensor:
    return batch["loss_mask"].double().sum()


def _words_alone(batch: Batch) -> Tensor:
    return torch.stack([_masked_words(batch)])  # [1]


def _words_and_samples(batch: Batch) -> Tensor:
    words = _masked_words(batch)
    return torch.stack([words, torch.full_like(words, batch["loss_mask"].shape[0])])  # [2]


MASKED_WORDS = Objective(("lm loss",), _loss_sums, _words_alone, inputs="text")
MASKED_WORDS_AND_ORDER = Objective(("lm loss", "sop loss"), _loss_sums, _words_and_samples, inputs="text")


def _objective(config: RunConfig) -> Objective:
    assert config.bert is not None, "these are the settings of a GPT"
    return MASKED_WORDS if config.bert.bert_no_binary_head else MASKED_WORDS_AND_ORDER


BERT = ModelFamily("BERT", build_bert, bert_datasets, _objective, is_causal=False)
