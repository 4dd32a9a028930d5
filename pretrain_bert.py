#!/usr/bin/env python3
"""Pretrain a BERT, dense or with Mixture-of-Experts layers. Start it with python or torchrun; --help lists flags."""

import sys

from megatron_parm.training.bert_family import BERT
from megatron_parm.training.entrance import pretrain

if __name__ == "__main__":
    sys.exit(pretrain(family=BERT))
