"""A classifier of texts as a kind of model: data, loss, metrics. Floor 7."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_parm.config.classify import ClassifyConfig
from megatron_parm.config.run import RunConfig
from megatron_parm.data.batches import Batch
from megatron_parm.data.bert_dataset import SpecialIds
from megatron_parm.data.build import GPTDatasets
from megatron_parm.data.gpt_dataset import SampleSource
from megatron_parm.data.labelled_texts import FILLER, Encoded, LabelledTexts, read_labelled
from megatron_parm.data.splits import SPLIT_NAMES, parse_split, split_bounds
from megatron_parm.errors import ConfigError
from megatron_parm.models.build import build_classifier
from megatron_parm.parallel import transport
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.tokenizers.wordpiece import WordPieceTokenizer
from megatron_parm.training.assemble import Assembly
from megatron_parm.training.entrance import pretrain
from megatron_parm.training.family import ModelFamily, data_paths
from megatron_parm.training.objective import Objective
from megatron_parm.training.pipelined import stages_of_run


@dataclass(frozen=True)
class SplitSummary:
    """One split as the log says it."""

    split_name: str
    lines: int

    def __str__(self) -> str:
        return f"{self.split_name}: {self.lines} labelled texts"


@dataclass(frozen=True)
class _Split:
    encoded: Encoded
    special: SpecialIds


def _classify(config: RunConfig) -> ClassifyConfig:
    assert config.classify is not None, "these are the settings of another model"
    return config.classify


def _splits(config: RunConfig, tokenizer: Tokenizer) -> list[_Split | None]:
    """Train, valid and test, encoded; None for one that is not named or empty."""
    assert isinstance(tokenizer, WordPieceTokenizer), "the settings were checked"
    special = SpecialIds(tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad)
    names, paths = _classify(config).class_names, data_paths(config)
    found: list[_Split | None] = []
    whole = _read(paths.whole, names, tokenizer) if paths.whole else None
    for number in range(len(SPLIT_NAMES)):
        if whole is not None:
            start, stop = split_bounds(parse_split(config.data.split), len(whole.labels))[number]
            part = Encoded(whole.first[start:stop], whole.second[start:stop], whole.labels[start:stop])
        else:
            part = _read(paths.by_split[number], names, tokenizer)
        found.append(_Split(part, special) if part.labels else None)
    return found


def _read(paths: Sequence[str], names: Sequence[str], tokenizer: Tokenizer) -> Encoded:
    parts = [read_labelled(Path(path), names, tokenizer) for path in paths]
    return Encoded(
        [ids for part in parts for ids in part.first],
        [ids for part in parts for ids in part.second],
        [label for part in parts for label in part.labels],
    )


def labelled_datasets(config: RunConfig, tokenizer: Tokenizer, vocab_size: int, requests: Sequence[int]) -> GPTDatasets:
    """The datasets of a classifier; see `DatasetBuilder`."""
    built: list[SampleSource | None] = []
    splits = _splits(config, tokenizer)
    for number, (split, request) in enumerate(zip(splits, requests, strict=True)):
        if split is None and request and number == 0:
            raise ConfigError("--train-data-path: there is no labelled text to train on")
        if split is None or not request:
            built.append(None)
            continue
        seed = config.training.seed + number
        dataset = LabelledTexts(split.encoded, split.special, config.data.seq_length, request, seed)
        built.append(cast(SampleSource, dataset))
    summaries = tuple(
        SplitSummary(name, len(split.encoded.labels))
        for name, split in zip(SPLIT_NAMES, splits, strict=True)
        if split is not None
    )
    return GPTDatasets(built[0], built[1], built[2], cast(Any, summaries))


def _run_model(model: nn.Module, batch: Batch, hidden: Tensor | None, *, with_labels: bool) -> Tensor:
    columns = cast("dict[str, Tensor]", batch)
    inputs = columns["text"] if hidden is None else hidden
    labels = (columns["label"],) if with_labels else ()
    output: Tensor = model(inputs, columns["padding_mask"], columns["types"], *labels)
    return output


def _is_hidden(output: Tensor) -> bool:
    return output.dim() == 3


def _loss_sums(model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    output = _run_model(model, batch, hidden, with_labels=True)
    return output if _is_hidden(output) else output.sum().unsqueeze(0)  # [1]


def _counted(batch: Batch) -> Tensor:
    labels = cast("dict[str, Tensor]", batch)["label"]
    return (labels != FILLER).double().sum().unsqueeze(0)  # [1]


CLASSES = Objective(("lm loss",), _loss_sums, _counted, inputs="text")


def confusion_objective(num_classes: int) -> Objective:
    """Counts in place of losses: entry label * num_classes + prediction."""
    cells = num_classes * num_classes

    def sums(model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
        output = _run_model(model, batch, hidden, with_labels=False)
        if _is_hidden(output):
            return output
        labels = cast("dict[str, Tensor]", batch)["label"]
        is_counted = labels != FILLER
        entries = labels[is_counted] * num_classes + output.argmax(-1)[is_counted]
        return torch.bincount(entries, minlength=cells).double()  # [classes * classes]

    return Objective(
        tuple(map(str, range(cells))), sums, lambda batch: _counted(batch).expand(cells).clone(), inputs="text"
    )


@dataclass(frozen=True)
class Metrics:
    """What a classifier is judged by. f1: of the second class of two, else the mean over the classes."""

    accuracy: float
    f1: float
    matthews: float
    samples: int

    @staticmethod
    def of(confusion: Sequence[Sequence[float]]) -> "Metrics":
        """From counts by label (row) and prediction (column). Matthews: Gorodkin 2004; 0 where it is undefined."""
        size = len(confusion)
        labels = [sum(row) for row in confusion]
        predictions = [sum(row[place] for row in confusion) for place in range(size)]
        total, right = sum(labels), sum(confusion[place][place] for place in range(size))
        f1 = [
            2 * confusion[place][place] / both if (both := labels[place] + predictions[place]) else 0.0
            for place in range(size)
        ]
        above = right * total - sum(label * guess for label, guess in zip(labels, predictions, strict=True))
        below = math.sqrt((total**2 - sum(g * g for g in predictions)) * (total**2 - sum(x * x for x in labels)))
        return Metrics(
            accuracy=right / max(total, 1),
            f1=f1[1] if size == 2 else sum(f1) / size,
            matthews=above / below if below else 0.0,
            samples=int(total),
        )


def measure(run: Assembly, split: _Split) -> Metrics:
    """The metrics of every text of a split, each counted once. Call on all ranks."""
    config, size = run.config, len(_classify(run.config).class_names)
    block = config.training.micro_batch_size * run.ctx.dp.size
    dataset = LabelledTexts(split.encoded, split.special, config.data.seq_length, None, 0, multiple=block)
    objective = confusion_objective(size)
    stages = stages_of_run(config, run.built, run.buffers, objective, run.ctx)
    batches = run.batches(cast(SampleSource, dataset), 0)
    counts = transport.sum_over(stages.evaluate(batches, len(dataset) // block), run.ctx.dp)[0]
    return Metrics.of(counts.view(size, size).tolist())


def tell_metrics(run: Assembly) -> None:
    """Say the metrics of validation and test, and keep them in metrics.json of --save. Call on all ranks."""
    run.optimizer.settle()
    found = {}
    for name, split in zip(SPLIT_NAMES, _splits(run.config, run.tokenizer), strict=True):
        if split is None or name == SPLIT_NAMES[0]:
            continue
        metrics = measure(run, split)
        found[name] = vars(metrics)
        run.log.say(
            f" > {name}: accuracy {metrics.accuracy:.4f} | F1 {metrics.f1:.4f} | Matthews {metrics.matthews:.4f} | "
            f"{metrics.samples} texts"
        )
    save = run.config.checkpoint.save
    if save is not None and run.ctx.rank == 0:
        (Path(save) / "metrics.json").write_text(json.dumps(found, indent=1) + "\n")


CLASSIFIER = ModelFamily("classifier", build_classifier, labelled_datasets, lambda config: CLASSES, is_causal=False)


def classify(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, train a classifier and measure it; returns the exit code of this worker."""
    return pretrain(argv, CLASSIFIER, tell_metrics)
