"""Which layers are MoE layers: a number, or a list expression like "([0]+[1]*3)*2". Floor 1.

Megatron hands such an expression to eval. Here a small interpreter over Python's own syntax tree knows lists of 0 and
1, whole numbers, + - * // % and the word `layers` (the number of layers); everything else is refused.
"""

import ast
import operator
from collections.abc import Callable

from megatron_parm.errors import ConfigError

_LONGEST_EXPRESSION = 1000  # characters
_LARGEST_NUMBER = 10_000  # of a list's length, or of any number on the way

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

Value = int | list[int]


def moe_layer_pattern(expression: str, num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it is an MoE layer.

    A number N makes layer i an MoE layer if i % N == 0; a list expression says 1 (MoE) or 0 (dense) for every layer.
    Raises ConfigError.
    """
    value = _value_of(expression, num_layers)
    if isinstance(value, int):
        if value < 1:
            raise _refusal(expression, "a number must be at least 1: every so many layers is an MoE layer")
        return tuple(layer % value == 0 for layer in range(num_layers))
    if set(value) - {0, 1}:
        raise _refusal(expression, "a list holds 1 for an MoE layer and 0 for a dense layer only")
    if len(value) != num_layers:
        raise _refusal(expression, f"it describes {len(value)} layers, --num-layers is {num_layers}")
    return tuple(entry == 1 for entry in value)


def every_last_of(interval: str) -> str:
    """The expression for DeepSpeed's --expert-interval: layers interval - 1, 2 interval - 1, ... counted from 0."""
    if not interval.isdecimal() or int(interval) < 1:
        raise ConfigError(f"--expert-interval {interval}: expected a whole number of at least 1")
    size = int(interval)
    return "1" if size == 1 else f"([0]*{size - 1}+[1])*(layers//{size})+[0]*(layers%{size})"


def _refusal(expression: str, reason: str) -> ConfigError:
    return ConfigError(f"--moe-layer-freq {expression}: {reason}; write a number like 2, or a list like ([0]+[1]*3)*2")


def _value_of(expression: str, num_layers: int) -> Value:
    if len(expression) > _LONGEST_EXPRESSION:
        raise ConfigError(f"--moe-layer-freq: the expression has {len(expression)} characters, at most 1000 are read")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _evaluate(tree.body, num_layers)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _refusal(expression, "this is neither a number nor a list expression") from None


def _evaluate(node: ast.expr, num_layers: int) -> Value:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _limited(number)
        case ast.Name(id="layers"):
            return num_layers
        case ast.List(elts=entries):
            return _limited([_number(_evaluate(entry, num_layers)) for entry in entries])
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            return _limited(_apply(symbol, _evaluate(left, num_layers), _evaluate(right, num_layers)))
        case _:
            raise ValueError("not part of the language")


def _apply(symbol: ast.operator, left: Value, right: Value) -> Value:
    if isinstance(left, int) and isinstance(right, int):
        return _OPERATORS[type(symbol)](left, right)
    if isinstance(symbol, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(symbol, ast.Mult):
        entries, times = (left, right) if isinstance(left, list) else (right, left)
        if isinstance(entries, list) and isinstance(times, int):
            _limited(len(entries) * max(times, 0))
            return entries * times
    raise TypeError("a list is only added to a list or repeated")


def _number(value: Value) -> int:
    if isinstance(value, list):
        raise TypeError("lists are not nested")
    return value


def _limited(value: Value) -> Value:
    size = len(value) if isinstance(value, list) else abs(value)
    if size > _LARGEST_NUMBER:
        raise ValueError("too large")
    return value
