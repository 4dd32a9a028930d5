"""BERT's WordPiece from vocab.txt, run by the `tokenizers` library. Floor 2. Source: Devlin et al. 2018; Megatron-LM.

As in Megatron the vocabulary is the file's, then [BOS] and [EOS] where the file lacks them, then --vocab-extra-ids.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_parm.errors import DataError
from megatron_parm.tokenizers.base import extra_id_names, replace_lone_surrogates

NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ADDED = ("[BOS]", "[EOS]")


class WordPieceTokenizer:
    """Words cut into the longest known pieces; a piece that goes on a word begins with `##`.

    `lower_case` also takes accents off. The text of a control token inside a document is encoded as plain text. A word
    of more than 100 characters is unknown, as in Hugging Face's BertTokenizer (Megatron: 200).
    """

    def __init__(self, vocab_file: Path, lower_case: bool, extra_ids: int = 0) -> None:
        kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        self.name = f"{kind} ({vocab_file})"
        words = _read_vocabulary(vocab_file)
        self._engine = FastTokenizer(
            models.WordPiece(
                vocab={piece: number for number, piece in enumerate(words)},
                unk_token="[UNK]",
                max_input_chars_per_word=100,
            )
        )
        self._engine.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        self._engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._engine.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        known = set(words)
        self.pieces = (*words, *(name for name in (*ADDED, *extra_id_names(extra_ids)) if name not in known))
        self.vocab_size = len(self.pieces)
        # the smallest vocabulary of a model that this tokenizer fits: a BERT never reads [BOS] and [EOS]
        self.least_vocab_size = self.vocab_size if extra_ids else len(words)
        places = {piece: number for number, piece in enumerate(self.pieces)}
        self.special_tokens = {name: places[name] for name in (*NEEDED, *ADDED, *extra_id_names(extra_ids))}
        self.pad, self.unknown, self.cls, self.sep, self.mask = (places[name] for name in NEEDED)
        self.bos, self.eod = (places[name] for name in ADDED)

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without [CLS] and [SEP]."""
        return self.encode_batch([text])[0]

    def encode_part(self, text: str) -> list[int]:
        """As `encode`, which puts nothing around a text."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, on one thread: the caller decides how many processes work."""
        encode = self._engine.encode_batch_fast
        return [encode([replace_lone_surrogates(text)], add_special_tokens=False)[0].ids for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The pieces as words with one blank between them; ids beyond the vocabulary (its padding) give nothing."""
        pieces = [self.pieces[number] for number in ids if 0 <= number < self.vocab_size]
        text: str = self._engine.decoder.decode(pieces)
        return text

    def continues_word(self, number: int) -> bool:
        """Whether a piece goes on the word of the piece before it."""
        return self.pieces[number].startswith("##")


def _read_vocabulary(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"--vocab-file {path}: not text in UTF-8 ({error}); BERT needs vocab.txt") from error
    words = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    missing = [name for name in NEEDED if name not in words]
    if missing:
        raise DataError(
            f"--vocab-file {path}: has no {' and no '.join(missing)}; BERT needs a vocab.txt of one piece a line with "
            f"{', '.join(NEEDED)}"
        )
    if len(set(words)) < len(words):
        twice = next(word for number, word in enumerate(words) if word in words[:number])
        raise DataError(f"--vocab-file {path}: the piece {twice!r} stands there twice; every line must be its own")
    return words
