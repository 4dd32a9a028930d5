"""A SentencePiece model file as a tokenizer. Floor 2."""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from megatron_parm.errors import ConfigError, DataError
from megatron_parm.tokenizers.base import replace_lone_surrogates


class SentencePieceTokenizer:
    """The model as it is: what its normaliser does to blanks and newlines is the model's own choice.

    `adds_begin` puts `<s>` before every text, as Megatron's Llama2Tokenizer does.
    """

    def __init__(self, model_file: Path, adds_begin: bool = False, extra_ids: int = 0) -> None:
        self.name = f"{'Llama2Tokenizer' if adds_begin else 'SentencePieceTokenizer'} ({model_file})"
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model_file.read_bytes())
        except (RuntimeError, OSError) as error:
            raise DataError(f"--tokenizer-model {model_file}: not a SentencePiece model ({error})") from error
        self._rows = int(self._model.vocab_size())
        self.vocab_size = self._rows + extra_ids
        self.unknown: int | None = int(self._model.unk_id())
        self.special_tokens = {
            self._model.id_to_piece(number): number
            for number in range(self._rows)
            if self._model.is_control(number) or self._model.is_unknown(number)
        }
        self._begin = [int(self._model.bos_id())] if adds_begin else []
        if self._begin == [-1]:
            raise ConfigError(
                f"{self.name} puts <s> before every text, and the model was trained without it (bos_id -1)"
            )

    @property
    def eod(self) -> int:
        """The model's own end-of-sentence id, usually `</s>`."""
        eod = int(self._model.eos_id())
        if eod < 0:
            raise ConfigError(
                f"{self.name} has no end-of-document token: the model was trained without </s> (eos_id -1); "
                "train it with eos, or choose another model"
            )
        return eod

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self._begin + self.encode_part(text)

    def encode_part(self, text: str) -> list[int]:
        """The ids of a part of a text, without `<s>`."""
        ids: list[int] = self._model.encode(replace_lone_surrogates(text), out_type=int)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on one thread: the caller decides how many processes work."""
        clean = [replace_lone_surrogates(text) for text in texts]
        found: list[list[int]] = self._model.encode(clean, out_type=int, num_threads=1)
        return [self._begin + ids for ids in found] if self._begin else found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; ids beyond the vocabulary (its padding) give nothing."""
        text: str = self._model.decode([number for number in ids if 0 <= number < self._rows])
        return text
