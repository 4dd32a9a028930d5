#!/usr/bin/env python3
"""Pretrain a GPT, dense or with Mixture-of-Experts layers. Start it with python or torchrun; --help lists the flags."""

import sys

from megatron_parm.training.entrance import pretrain

if __name__ == "__main__":
    sys.exit(pretrain())
