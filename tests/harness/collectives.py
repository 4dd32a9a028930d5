"""Which collectives a rank starts, in order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from megatron_parm.parallel import transport


@contextmanager
def counted(calls: list[str]) -> Iterator[None]:
    """Within this context `calls` gets the name of every collective; one made of others counts once."""
    names = ("start_gather_stack", "start_scatter_sum", "start_sum_over", "start_exchange", "sum_over_")
    kept = {name: getattr(transport, name) for name in names}

    def counting(name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            calls.append(name)
            before = len(calls)
            found = kept[name](*args)
            del calls[before:]  # what a collective is made of is not another one
            return found

        return call

    with patch.multiple(transport, **{name: counting(name) for name in names}):
        yield
