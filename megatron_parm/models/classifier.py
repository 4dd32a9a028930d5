"""A BERT with a head for classes of texts in place of its two heads of pretraining. Floor 6.

Source: Devlin et al. 2018. Names are those of `BertModel`, so a pretrained checkpoint fills everything but the head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.dropout import StreamDropout
from megatron_parm.models.bert import BertEncoder
from megatron_parm.models.bert_heads import Pooler, WholeLinear
from megatron_parm.models.block import FeedForwardMaker
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis

HEAD = "classification_head."
NO_CLASS = -1  # the label of a sample that only fills a batch


class BertClassifier(BertEncoder):
    """Encoder, pooler, dropout, a linear head; everything else as in `BertModel`.

    `head_generator` is the stream of the dropout before the head, which is identical on tp.
    """

    def __init__(
        self,
        shape: ModelShape,
        feed_forward: FeedForwardMaker,
        num_classes: int,
        dropout: float,
        *,
        tp: Axis,
        generator: torch.Generator | None,
        head_generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[range] | None = None,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__(
            shape,
            feed_forward,
            tp=tp,
            generator=generator,
            dtype=dtype,
            device=device,
            parts=parts,
            has_word_head=False,
            execution=execution,
        )
        if self.is_last:
            self.pooler = Pooler(shape, dtype=dtype, device=device)
            self.dropout = StreamDropout(dropout, head_generator)
            self.classification_head = WholeLinear(
                shape.hidden_size, num_classes, initialiser=shape.initialiser, dtype=dtype, device=device
            )

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor,
        token_types: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        part: int = 0,
    ) -> Tensor:
        """Logits [b, classes], or with `labels` [b] the losses [b], 0 for `NO_CLASS`, in float32 (float64 stays).

        A stage that is not the last returns its hidden states. Call on all ranks of tp.
        """
        hidden = self.encode(tokens, padding_mask, token_types, part=part)  # [s, b, h]
        if self.layers_of_parts[part].stop != self.shape.num_layers:
            return hidden
        logits: Tensor = self.classification_head(self.dropout(self.pooler(hidden)))  # [b, classes]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels, reduction="none", ignore_index=NO_CLASS)  # [b]

    @property
    def stages(self) -> list[nn.Module]:
        """Each part as a module of its own, over the same parameters and with the arguments of `forward`."""
        return [_Stage(self, part) for part in range(len(self.layers_of_parts))]


class _Stage(nn.Module):
    def __init__(self, model: BertClassifier, part: int) -> None:
        super().__init__()
        self.model = model
        self.part = part

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.model(*inputs, part=self.part)
        return output
