"""The corpus that the tests of this room share."""

from tests.training.runs import corpus

__all__ = ["corpus"]
