"""Parts of a forward pass that run again in backward instead of keeping what they computed. Floor 4.

By torch's checkpoint without reentry: the graph of the first run stays, so every gradient, hook and balance loss comes
once, and only saved tensors are made anew. Source: Chen et al. 2016; Korthikanti et al. 2022, section 5 (selective).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Recomputation:
    """Runs a function so that backward runs it again, with the random numbers of the first run.

    streams: the generators it may draw from beside the device's default one, which is restored too. quietly: makes the
    context of every second run, in which what was counted in the first is not counted again.
    """

    def __init__(
        self,
        streams: Sequence[torch.Generator] = (),
        quietly: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._streams = tuple(streams)
        self._quietly = quietly

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor, is_local: bool = True) -> Tensor:
        """`function(*inputs)`; of what it computes only the inputs are kept. Without gradients it simply runs.

        A function that is not `is_local` calls collectives: its second run goes to its very end, so that all ranks call
        the same ones. A local one ends as soon as the last kept tensor is there.
        """
        if not torch.is_grad_enabled():
            return function(*inputs)
        result = checkpoint(
            function, *inputs, use_reentrant=False, context_fn=self._contexts, early_stop=is_local
        )  # the default stream of the device is restored by torch
        assert isinstance(result, Tensor)
        return result

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._again([stream.get_state() for stream in self._streams])

    @contextmanager
    def _again(self, states: list[Tensor]) -> Iterator[None]:
        now = [stream.get_state() for stream in self._streams]
        for stream, state in zip(self._streams, states, strict=True):
            stream.set_state(state)
        try:
            with self._quietly():
                yield
        finally:
            for stream, state in zip(self._streams, now, strict=True):
                stream.set_state(state)


@dataclass(frozen=True)
class _Recipe:
    """How to make a tensor again, and the shape in which it was to be kept."""

    make: Callable[[], Tensor]
    shape: torch.Size


def without_keeping(output: Tensor, make: Callable[[], Tensor]) -> saved_tensors_hooks:
    """A context in which operators that would keep `output` for their backward keep the recipe instead.

    `make()` gives `output` again, bit for bit; it must neither communicate nor draw random numbers.
    """
    place, numel, dtype = (
        output.data_ptr(),
        output.numel(),
        output.dtype,
    )  # the graph holds `pack`, so not `output` itself

    def pack(kept: Tensor) -> Tensor | _Recipe:
        is_output = (kept.data_ptr(), kept.numel(), kept.dtype) == (place, numel, dtype) and kept.is_contiguous()
        return _Recipe(make, kept.shape) if is_output else kept

    def unpack(kept: Tensor | _Recipe) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return kept.make().view(kept.shape)

    return saved_tensors_hooks(pack, unpack)
