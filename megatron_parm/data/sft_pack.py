"""Conversations packed into samples of one length: loss on answers alone, each conversation for itself. Floor 4.

Positions count anew in every conversation and no token sees another one (a block-diagonal mask). A conversation of
n ids fills n - 1 places: its last id is only a label.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.gpt_dataset import Sample

_OPEN_PACKS = 64


@dataclass(frozen=True)
class Conversations:
    """Encoded conversations back to back: number i is [starts[i], starts[i + 1]). `is_answer` is 0 or 1."""

    ids: NDArray[np.integer]
    is_answer: NDArray[np.integer]
    starts: NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pairs(self, number: int, most: int) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
        """Inputs, labels, and which labels are answers, of one conversation, cut behind `most` places."""
        start = int(self.starts[number])
        stop = min(int(self.starts[number + 1]), start + most + 1)
        return self.ids[start : stop - 1], self.ids[start + 1 : stop], self.is_answer[start + 1 : stop]


def pack(places: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of conversations in packs of at most `capacity` places; `places[i]` are those of number i, cut to it.

    Each goes into the first of the last 64 packs that has room for it; the order of packs is that of their first.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for number, wanted in enumerate(places):
        size = min(int(wanted), capacity)
        first_open = max(0, len(packs) - _OPEN_PACKS)
        fitting = next((place for place in range(first_open, len(packs)) if room[place] >= size), None)
        if fitting is None:
            packs.append([number])
            room.append(capacity - size)
        else:
            packs[fitting].append(number)
            room[fitting] -= size
    return packs


class PackedConversations:
    """Samples of `sequence_length` from packs of conversations, shuffled anew for each epoch, `num_samples` of them.

    The rest of a sample is filled with `pad`, a block of its own without loss, which is no text.
    """

    def __init__(
        self,
        conversations: Conversations,
        numbers: range,
        sequence_length: int,
        pad: int,
        num_samples: int | None,
        seed: int,
    ) -> None:
        self.conversations = conversations
        self.sequence_length = sequence_length
        self._pad = pad
        places = np.diff(conversations.starts[numbers.start : numbers.stop + 1]) - 1
        self.packs = [[numbers.start + number for number in group] for group in pack(places.tolist(), sequence_length)]
        total = len(self.packs) if num_samples is None else num_samples
        random = np.random.RandomState(seed)
        epochs = [random.permutation(len(self.packs)) for _ in range(-(-total // len(self.packs)))]
        self._order = np.concatenate(epochs)[:total]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> Sample:
        length = self.sequence_length
        tokens, labels = (np.full(length, self._pad, dtype=np.int64) for _ in range(2))
        loss_mask, positions = np.zeros(length, dtype=np.float32), np.zeros(length, dtype=np.int64)
        block = np.zeros(length, dtype=np.int64)
        start = 0
        for count, conversation in enumerate(self.packs[self._order[number]], start=1):
            inputs, targets, is_answer = self.conversations.pairs(conversation, length)
            span = slice(start, start + len(inputs))
            tokens[span], labels[span], loss_mask[span] = inputs, targets, is_answer
            positions[span], block[span] = np.arange(len(inputs)), count
            start = span.stop
        positions[start:] = np.arange(length - start)
        is_later = np.triu(np.ones((length, length), dtype=bool), k=1)
        return Sample(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            position_ids=positions,
            attention_mask=(is_later | (block[:, None] != block[None, :]))[None],
            is_text=block > 0,
        )
