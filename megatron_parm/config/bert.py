"""What only a BERT has. Floor 1. Names: Megatron's, and `--bert-layout`."""

# ruff: noqa: RUF009 - flag() is dataclasses.field

from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.fields import flag

BertLayout = Literal["megatron", "original"]


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """BERT, flags of pretrain_bert.py alone."""

    bert_layout: BertLayout = flag(
        "megatron",
        help="where norms stand: before attention and feed-forward, and one at the end (megatron); or after each sum "
        "and after the embedding, as Devlin et al. and Hugging Face have it (original)",
    )
    bert_no_binary_head: bool = flag(
        False, help="train on masked words alone: one segment, no pooler, no head for the order of two segments"
    )
    mask_prob: float = flag(0.15, help="part of a sample's tokens to mask", unit="fraction", above=0, below=1)
    short_seq_prob: float = flag(
        0.1, help="part of the samples that are made shorter", unit="fraction", at_least=0, at_most=1
    )
