"""A Hugging Face tokenizer.json from a local file or folder, without transformers and without a network. Floor 2.

The file alone decides how text is cut, and which ids its template puts around a document (as a call of transformers'
tokenizer does). tokenizer_config.json or special_tokens_map.json beside it name the end of document.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.base import replace_lone_surrogates

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")


class HuggingFaceTokenizer:
    """The file as it is, without its truncation and padding. A control token's text in a document is plain text."""

    def __init__(self, path: Path, extra_ids: int = 0) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"--tokenizer-model {path}: no tokenizer.json there; give a local folder that holds one, or the file "
                "itself (nothing is downloaded)"
            )
        self.name = f"HuggingFaceTokenizer ({path})"
        try:
            self._engine = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            raise DataError(f"--tokenizer-model {file}: not a tokenizer.json that can be read ({error})") from error
        self._engine.no_truncation()
        self._engine.no_padding()
        self._engine.encode_special_tokens = True
        added = self._engine.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._rows = max(self._engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = self._rows + extra_ids
        named = _named_tokens(file.parent)
        self._end = named.get("eos_token")
        unknown = named.get("unk_token") or getattr(self._engine.model, "unk_token", None)
        self.unknown: int | None = self._engine.token_to_id(unknown) if isinstance(unknown, str) else None

    @property
    def eod(self) -> int:
        """The id of the `eos_token` that the files name."""
        number = None if self._end is None else self._engine.token_to_id(self._end)
        if number is None:
            reason = (
                f"eos_token {self._end!r} is not in its vocabulary"
                if self._end
                else f"no eos_token in {' or '.join(_BESIDE)}"
            )
            raise ConfigError(
                f"{self.name} has no end-of-document token: {reason}; add it, or choose another tokenizer"
            )
        return int(number)

    def encode(self, text: str) -> list[int]:
        """The ids of one text, with those that the file's own template adds."""
        return self.encode_batch([text])[0]

    def encode_part(self, text: str) -> list[int]:
        """The ids of a part of a text, without those that the file's own template adds."""
        found = self._engine.encode_batch_fast([replace_lone_surrogates(text)], add_special_tokens=False)
        ids: list[int] = found[0].ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on one thread: the caller decides how many processes work."""
        encode = self._engine.encode_batch_fast
        return [encode([replace_lone_surrogates(text)])[0].ids for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ids beyond the vocabulary (its padding) give nothing."""
        text: str = self._engine.decode([number for number in ids if number < self._rows], skip_special_tokens=False)
        return text


def _named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the files beside tokenizer.json name; the first file wins."""
    named: dict[str, str] = {}
    for name in _BESIDE:
        path = folder / name
        if not path.is_file():
            continue
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"--tokenizer-model {path}: not JSON in UTF-8 ({error})") from error
        if not isinstance(fields, dict):
            raise DataError(f"--tokenizer-model {path}: must be a JSON object, found {type(fields).__name__}")
        for key, value in fields.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named.setdefault(key, text)
    return named
