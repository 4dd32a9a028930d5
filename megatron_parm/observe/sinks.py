"""Where records go, and the promise that a failing place never stops training. Floor 2."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from megatron_parm.observe.records import Record


class Sink(Protocol):
    """A place that takes records. It may raise whatever it likes: the `Recorder` answers for it."""

    def write(self, record: Record) -> None:
        """Show or store one record."""

    def close(self) -> None:
        """Finish. Nothing is written afterwards."""


class Recorder:
    """Hands each record to every sink; a sink that fails is left out from then on, with one warning.

    Only the rank that reports adds sinks; a Recorder without sinks takes records and does nothing, so that every rank
    may run the same code. `warn_once` is `Log.warn_once`.
    """

    def __init__(self, warn_once: Callable[[str, str], None]) -> None:
        self._warn_once = warn_once
        self._sinks: dict[str, Sink] = {}

    def add(self, name: str, make: Callable[[], Sink]) -> None:
        """Make a sink and keep it under `name`, the words of a warning (`TensorBoard (--tensorboard-dir DIR)`)."""
        self._attempt(name, lambda: self._sinks.update({name: make()}))

    def write(self, record: Record) -> None:
        """Hand `record` to every sink that still works."""
        for name, sink in list(self._sinks.items()):
            self._attempt(name, partial(sink.write, record))

    def close(self) -> None:
        """Close every sink that still works."""
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.close)
        self._sinks.clear()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        """Run `action`; on any failure drop the sink and go on.

        Broad on purpose: writers of other packages raise what they like (network, protobuf, disk), and none of it is
        worth a training run.
        """
        try:
            action()
        except Exception as error:
            self._sinks.pop(name, None)
            self._warn_once(
                f"sink {name}",
                f"{name} failed and is switched off, training goes on: {type(error).__name__}: {error}",
            )
