"""When reductions may use the links: not while an MoE layer exchanges tokens. Floor 4.

Reductions and the AlltoAlls of an MoE layer share the links, and only the AlltoAlls are waited for: a bucket that runs
beside one delays backward by what it takes of the link, and hides nothing that it would not hide a little later beside
attention. So buckets that become complete inside the backward of a watched layer wait until it has ended. The end of
backward sends whatever still waits. On the cluster measured in docs/performance.md, "Gradient reduction", waiting took
as long as sending at once, and both 0.82 of the step without overlap.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class ExchangeGaps:
    """Open, except while the backward of a watched layer runs."""

    def __init__(self, layers: Sequence[nn.Module] = ()) -> None:
        self.is_open = True
        self._listeners: list[Callable[[], None]] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._mark_end)
            layer.register_forward_hook(self._mark_beginning)

    def when_open(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a gap opens."""
        self._listeners.append(listener)

    def _mark_beginning(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Backward enters the layer when it has the gradient of its output, and ends with that of its input.

        A layer whose input needs no gradient would never end, so it does not begin.
        """
        if output.requires_grad and inputs[0].requires_grad:
            output.register_hook(self._close)  # type: ignore[no-untyped-call]  # torch's

    def _mark_end(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(self._open)  # type: ignore[no-untyped-call]  # torch's

    def _close(self, _: Tensor) -> None:
        self.is_open = False

    def _open(self, _: Tensor) -> None:
        self.is_open = True
        for listener in self._listeners:
            listener()
