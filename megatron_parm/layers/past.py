"""Keys and values of the tokens that a text began with, kept so that one more token costs one row. Floor 4."""

from torch import Tensor


class LayerPast:
    """The keys and values of one attention, [positions, b, groups/tp, d] each: so many of them as were seen."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def length(self) -> int:
        """Positions that are kept."""
        return self._length

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next positions [s, b, groups/tp, d]; returns all that were ever given."""
        if self._key is None or self._value is None:
            self._key = key.new_empty(self._positions, *key.shape[1:])
            self._value = value.new_empty(self._positions, *value.shape[1:])
        start, self._length = self._length, self._length + key.shape[0]
        assert self._length <= self._positions, "more positions than there is room for"
        self._key[start : self._length] = key
        self._value[start : self._length] = value
        return self._key[: self._length], self._value[: self._length]


class Past:
    """That of every layer of a model, by its number. `positions`: the most that will be kept."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._layers: dict[str, LayerPast] = {}

    def layer(self, number: str) -> LayerPast:
        """The past of one layer, empty at first."""
        if number not in self._layers:
            self._layers[number] = LayerPast(self._positions)
        return self._layers[number]
