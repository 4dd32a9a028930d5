"""The blocks that a pipeline rank holds, under their global numbers. Floor 6."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron_parm.layers.past import Past
from megatron_parm.layers.rotary import Rotation, make_rotation
from megatron_parm.models.block import FeedForwardMaker, TransformerBlock, make_norm
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.post_norm import PostNormBlock
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis


class TransformerStage(nn.Module):
    """Blocks `layers` of a transformer; the rank with the last one holds the final norm too.

    Blocks are named by their number in the whole model (`layers.7.`), so every layout has the same parameter names.
    """

    def __init__(
        self,
        shape: ModelShape,
        layers: Sequence[int],
        feed_forward: FeedForwardMaker,
        *,
        tp: Axis,
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__()
        self.shape, self.execution, self.dtype = shape, execution, dtype
        make_block = PostNormBlock if shape.norm_placement == "post" else TransformerBlock
        self.layers = nn.ModuleDict()
        for layer in layers:
            self.layers[str(layer)] = make_block(
                shape,
                feed_forward(layer),
                tp=tp,
                generator=generator,
                dtype=dtype,
                device=device,
                execution=execution,
            )
        self.final_layernorm: nn.Module = nn.Identity()
        if shape.num_layers - 1 in layers and shape.norm_placement == "pre":
            self.final_layernorm = make_norm(shape, dtype=dtype, device=device, execution=execution)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        layers: range | None = None,
        is_text: Tensor | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """[s, b, h] -> [s, b, h] through `layers` (default: all that are held), the final norm after the last layer.

        Slices [s/tp, b, h] under sequence parallelism.

        `position_ids` [b, s] and `attention_mask` bool [b or 1, 1, s, s], True where a query may not attend, are those
        of the whole sequence, as is `is_text` bool [s, b], False for padding; None: all is text. With a `past` of p
        positions `x` is what follows them, and the mask, which must be given and obeys the causal rule itself, is
        [b or 1, 1, s, p + s].
        """
        rotation = None
        if self.shape.positions == "rope":
            rotation = make_rotation(self.shape.rotary, self.shape.head_dim, position_ids, self.dtype)
        may_attend = None if attention_mask is None else self._may_attend(attention_mask, past)
        held = list(self.layers) if layers is None else [str(layer) for layer in layers]
        for names, runs_again in self.execution.groups(held):
            run = partial(self._run, names, rotation, may_attend, is_text, past)
            x = self.execution.recomputation(run, x, is_local=False) if runs_again else run(x)
        return self.final_layernorm(x) if held[-1] == str(self.shape.num_layers - 1) else x

    def _run(
        self,
        names: list[str],
        rotation: Rotation | None,
        may_attend: Tensor | None,
        is_text: Tensor | None,
        past: Past | None,
        x: Tensor,
    ) -> Tensor:
        for name in names:
            x = self.layers[name](x, rotation, may_attend, is_text, None if past is None else past.layer(name))
        return x

    def _may_attend(self, attention_mask: Tensor, past: Past | None) -> Tensor:
        if past is not None or not self.shape.is_causal:
            return ~attention_mask
        return (~attention_mask).tril()  # a mask of documents alone must not open the future
