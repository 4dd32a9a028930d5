"""A kind of model as a value: how it is built, what it reads, what it is trained for. Floor 7.

An entrance hands one to the trainer; nothing below asks which it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_parm.config.parser import ModelKind
from megatron_parm.config.run import RunConfig
from megatron_parm.data.build import GPTDataRules, GPTDatasets
from megatron_parm.data.data_paths import DataPaths, read_data_paths
from megatron_parm.data.gpt_dataset import DocumentRules
from megatron_parm.models.build import BuiltModel
from megatron_parm.moe.cost import CostModel
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.training.objective import Objective


class ModelBuilder(Protocol):
    """Builds a model with initial weights; see `build_gpt`."""

    def __call__(
        self,
        config: RunConfig,
        vocab_size: int,
        padded_vocab_size: int,
        ctx: ParallelContext,
        generator: torch.Generator,
        cost_model: CostModel,
        /,
    ) -> BuiltModel:
        """The model, the same weights on every layout. Call on all ranks."""


class DatasetBuilder(Protocol):
    """Opens the data of a resolved config; `requests` are the samples of train, valid and test."""

    def __call__(
        self, config: RunConfig, tokenizer: Tokenizer, vocab_size: int, requests: Sequence[int], /
    ) -> GPTDatasets:
        """The datasets, the same on every process. Raises ConfigError and DataError."""


def data_rules(config: RunConfig, vocab_size: int, documents: DocumentRules) -> GPTDataRules:
    """What the settings say of the data of any kind of model."""
    data = config.data
    return GPTDataRules(
        sequence_length=data.seq_length,
        seed=config.training.seed,
        vocab_size=vocab_size,
        documents=documents,
        split_rounding="classic" if data.split_rounding == "classic" else "core",
        data_cache_path=data.data_cache_path,
        maps_tokens=not data.no_mmap_bin_files,
    )


def data_paths(config: RunConfig) -> DataPaths:
    """Where the data of any kind of model lies."""
    data = config.data
    return read_data_paths(
        data.data_path,
        (data.train_data_path, data.valid_data_path, data.test_data_path),
        data_args_path=data.data_args_path,
        per_split_data_args_path=data.per_split_data_args_path,
    )


@dataclass(frozen=True)
class ModelFamily:
    """A kind of model. `is_causal`: a token sees only those before it."""

    kind: ModelKind
    build_model: ModelBuilder
    build_datasets: DatasetBuilder
    objective: Callable[[RunConfig], Objective]
    is_causal: bool
