"""Rules of a BERT's settings. Reference: each message names the flag, the rule and a remedy."""

import pytest

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run
from megatron_parm.errors import ConfigError

BERT = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --train-iters 4 --lr 1e-3 --tokenizer-type BertWordPieceCase --vocab-file vocab.txt "
    "--data-path text"
)


def _check(more: str, leave_out: str = "") -> None:
    check_run(parse_run_config([*BERT.replace(leave_out, "").split(), *more.split()], model="BERT")[0], 1)


def test_a_sound_bert_passes() -> None:
    _check("--bert-layout original --bert-no-binary-head --mask-prob 0.2 --short-seq-prob 0")


@pytest.mark.parametrize(
    ("more", "leave_out", "words"),
    [
        ("--untie-embeddings-and-output-weights", "", "uses the word embedding; leave it out"),
        ("--seq-length 4", "", "--seq-length 4 is too short"),
        ("--mock-data", "--data-path text", "--mock-data makes documents without sentences"),
        ("--tokenizer-type NullTokenizer --vocab-size 9", "", "NullTokenizer has no [CLS]"),
        ("--eod-mask-loss", "", "--eod-mask-loss is for documents joined"),
        ("--reset-attention-mask", "", "--reset-attention-mask is for documents joined"),
        ("--mask-prob 0", "", "--mask-prob 0"),
        ("--short-seq-prob 1.5", "", "--short-seq-prob 1.5"),
    ],
)
def test_what_a_bert_cannot_be_is_refused(more: str, leave_out: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        _check(more, leave_out)
    assert words in str(error.value)
