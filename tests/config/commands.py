"""Small commands that the tests of config/ start from."""

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import RunConfig

_TINY = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --train-iters 4 --lr 1e-3 --min-lr 1e-4 --mock-data --tokenizer-type NullTokenizer
--vocab-size 100"""
TINY = _TINY.split()


def config_of(extra: str = "") -> RunConfig:
    """The tiny run with more flags."""
    return parse_run_config([*TINY, *extra.split()])[0]


def notes_of(extra: str) -> list[str]:
    """The notes of the tiny run with more flags."""
    return parse_run_config([*TINY, *extra.split()])[1]
