#!/usr/bin/env python3
"""Fine-tune a BERT to classify texts or pairs of texts. Start it with python or torchrun; --help lists flags."""

import sys

from megatron_parm.training.classification import classify

if __name__ == "__main__":
    sys.exit(classify())
