"""Joins several `.bin`/`.idx` pairs to one, as if their documents had been written one after another. Floor 4.

Source: Megatron-Core's `tools/merge_datasets.py`: the pairs of a folder in the order of their names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_parm.data.index_format import bin_path, idx_path
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.errors import ConfigError, DataError


@dataclass(frozen=True)
class Merged:
    """What a merge has written, and the inputs whose modes it left out."""

    documents: int
    sequences: int
    tokens: int
    without_modes: tuple[str, ...]


def pairs_of(folder: Path) -> list[str]:
    """The prefixes of a folder in the order of their names. Raises DataError if a file lacks its other half."""
    names = {suffix: {path.stem for path in folder.glob(f"*{suffix}")} for suffix in (".bin", ".idx")}
    for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
        alone = sorted(names[suffix] - names[other])
        if alone:
            raise DataError(
                f"{folder / (alone[0] + suffix)} has no {other} beside it; preprocess it again, or move it elsewhere"
            )
    if not names[".idx"]:
        raise ConfigError(f"--input {folder}: the folder holds no .bin and .idx pair")
    return [str(folder / name) for name in sorted(names[".idx"])]


def merge(prefixes: Sequence[str], output: str, *, keeps_modes: bool = False) -> Merged:
    """Write the documents of all `prefixes`, in this order, to `output`; all of it or nothing.

    Raises DataError for a damaged input, inputs of different number types, and with `keeps_modes` (multimodal files)
    for one without modes; ConfigError if `output` is one of the inputs. Every input is opened before a byte is written.
    """
    for prefix in prefixes:
        if Path(prefix).resolve() == Path(output).resolve():
            raise ConfigError(
                f"--output-prefix {output} is one of the inputs; a merge is never made in place: name another file"
            )
    inputs = [IndexedDataset(prefix, allows_floats=True) for prefix in prefixes]
    kinds = {dataset.dtype: dataset.name for dataset in inputs}
    if len(kinds) > 1:
        listed = ", ".join(f"{dtype} in {name}" for dtype, name in kinds.items())
        raise DataError(
            f"the inputs hold numbers of different types: {listed}; preprocess all of them with the same tokenizer"
        )
    with IndexedWriter(output, inputs[0].dtype, has_modes=keeps_modes) as writer:
        for dataset in inputs:
            writer.add_dataset(dataset)
    return Merged(
        sum(dataset.num_documents for dataset in inputs),
        sum(len(dataset) for dataset in inputs),
        writer.num_tokens,
        () if keeps_modes else tuple(dataset.name for dataset in inputs if dataset.modes is not None),
    )


def exists(prefix: str) -> bool:
    """Whether either file of a prefix is there."""
    return bin_path(prefix).exists() or idx_path(prefix).exists()
