"""How a model runs, beside what it computes: which parts of the activations a rank holds. Floor 6."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """Choices that leave the parameters, their names and shapes, and (up to rounding) all results as they are.

    sequence_parallel: between the parts that are cut over tp a rank holds its own slice of the sequence, [s/tp, b, h],
    instead of the whole, [s, b, h]. Without effect where tp has one rank.
    """

    sequence_parallel: bool = False


PLAIN = Execution()
