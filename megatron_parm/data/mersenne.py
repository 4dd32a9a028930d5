"""The 64-bit Mersenne Twister, which numpy lacks. Floor 4. Source: Nishimura 2000; C++'s std::mt19937_64.

Megatron shuffles BERT's sentence map with it. A block of 312 numbers is made by a handful of array operations.
"""

import numpy as np
from numpy.typing import NDArray

_WORDS, _MIDDLE = 312, 156
_UPPER = np.uint64(0xFFFFFFFF80000000)
_LOWER = np.uint64(0x7FFFFFFF)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_SEED_FACTOR = 6364136223846793005
_TEMPER = (  # y ^= (y shifted right, or left where negative) & mask
    (29, np.uint64(0x5555555555555555)),
    (-17, np.uint64(0x71D67FFFEDA60000)),
    (-37, np.uint64(0xFFF7EEE000000000)),
    (43, np.uint64(0xFFFFFFFFFFFFFFFF)),
)


class MersenneTwister64:
    """The stream of MT19937-64 from a seed, in order."""

    def __init__(self, seed: int) -> None:
        words = [seed % 2**64]
        for number in range(1, _WORDS):
            words.append((_SEED_FACTOR * (words[-1] ^ (words[-1] >> 62)) + number) % 2**64)
        self._state = np.array(words, dtype=np.uint64)
        self._ready = np.empty(0, dtype=np.uint64)

    def draw(self, count: int) -> NDArray[np.uint64]:
        """The next `count` numbers."""
        parts, found = [self._ready], len(self._ready)
        while found < count:
            parts.append(self._block())
            found += _WORDS
        numbers = _temper(np.concatenate(parts[1:])) if len(parts) > 1 else self._ready[:0]
        numbers = np.concatenate([self._ready, numbers])
        self._ready = numbers[count:]
        return numbers[:count]

    def _block(self) -> NDArray[np.uint64]:
        """The next state, untempered. Its second half is made of the first, its last word of the first word."""
        state = self._state.copy()
        first = _WORDS - _MIDDLE
        state[:first] = state[_MIDDLE:] ^ _twist(state[:first], state[1 : first + 1])
        state[first:-1] = state[: _MIDDLE - 1] ^ _twist(state[first:-1], state[first + 1 :])
        state[-1:] = state[_MIDDLE - 1 : _MIDDLE] ^ _twist(state[-1:], state[:1])
        self._state = state
        return state


def _twist(word: NDArray[np.uint64], following: NDArray[np.uint64]) -> NDArray[np.uint64]:
    joined = (word & _UPPER) | (following & _LOWER)
    return (joined >> np.uint64(1)) ^ ((joined & np.uint64(1)) * _MATRIX)


def _temper(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, mask in _TEMPER:
        moved = words >> np.uint64(shift) if shift > 0 else words << np.uint64(-shift)
        words = words ^ (moved & mask)
    return words
