"""Small arithmetic of messages: which numbers would work, as a text. Floor 1."""

_MOST_NAMED = 8  # values that a message lists


def divisors(number: int) -> list[int]:
    """Every whole number that divides `number`, smallest first."""
    return [d for d in range(1, number + 1) if number % d == 0]


def one_of(numbers: list[int]) -> str:
    """The numbers as a text: "1, 2 or 4"."""
    named = [str(number) for number in numbers[:_MOST_NAMED]]
    if len(named) < len(numbers):
        return ", ".join(named) + " ..."
    return " or ".join(filter(None, (", ".join(named[:-1]), named[-1]))) if named else "none"


def common_divisors(first: int, second: int) -> list[int]:
    """Every whole number that divides both."""
    return [d for d in divisors(first) if second % d == 0]
