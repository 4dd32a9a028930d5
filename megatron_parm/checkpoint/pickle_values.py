"""A pickle read as data by a machine that has no call in it. Floor 6.

Python's unpickler looks up the names that a file asks for and calls them, so a file from a stranger can run anything.
Here the opcodes (pickletools decodes them) only move values on a stack. A global must be in the caller's table, which
says which function of ours makes a plain value of its arguments; any other is refused by its name before anything
else is read (docs/convert.md).
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from megatron_parm.errors import CheckpointError, MegatronParmError, UntrustedCheckpointError

Maker = Callable[..., object]
DAMAGE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError, RecursionError)


@dataclass(frozen=True)
class Global:
    """A name that a pickle asks for, `module.name`. It stays a name."""

    name: str


@dataclass(eq=False)
class Instance:
    """What a pickle says of an object: its class, what it was made of, its attributes. The object is never made."""

    kind: str
    arguments: tuple[object, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    state: object = None  # where the class keeps its attributes in another form

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)


def instances_of(*kinds: str) -> dict[str, Maker]:
    """Rows of a table: objects of these classes become an `Instance`."""

    def make(kind: str) -> Maker:
        return lambda *arguments: Instance(kind, arguments)

    return {kind: make(kind) for kind in kinds}


class _Mark:
    """Where the items of a container begin on the stack."""


_MARK = _Mark()
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_WORDS = (
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
)
_VALUES = set(_WORDS.split())
_LAST = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NEW: dict[str, Callable[[], object]] = {
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple
}  # fmt: skip


class _Machine:
    def __init__(self, makers: Mapping[str, Maker], stored: Callable[[object], object] | None, where: str) -> None:
        self._makers, self._stored, self._where = makers, stored, where
        self._stack: list[Any] = []
        self._memo: dict[int, object] = {}

    def run(self, file: BinaryIO) -> object:
        """The value of the pickle that begins at the place of `file`, which is left behind it."""
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name == "STOP":
                break
            if name in _VALUES:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _NEW:
                self._stack.append(_NEW[name]())
            elif name in _LAST:
                self._stack[-_LAST[name] :] = [tuple(self._stack[-_LAST[name] :])]
            elif name in ("PROTO", "FRAME"):
                continue
            elif hasattr(self, f"_on_{name.lower()}"):
                getattr(self, f"_on_{name.lower()}")(argument)
            else:
                raise UntrustedCheckpointError(
                    f"{self._where} uses the pickle opcode {name}, which no checkpoint needs; nothing of it was run"
                )
        (value,) = self._stack
        return value

    def _items(self) -> list[Any]:
        """What lies above the last mark, taken off with the mark."""
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
        items = self._stack[place + 1 :]
        if _MARK in items or place < 0:
            raise ValueError("a mark is missing")
        del self._stack[place:]
        return items

    def _on_mark(self, _: object) -> None:
        self._stack.append(_MARK)

    def _on_pop(self, _: object) -> None:
        self._stack.pop()

    def _on_pop_mark(self, _: object) -> None:
        self._items()

    def _on_dup(self, _: object) -> None:
        self._stack.append(self._stack[-1])

    def _on_put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    _on_binput = _on_long_binput = _on_put

    def _on_memoize(self, _: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _on_get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    _on_binget = _on_long_binget = _on_get

    def _on_tuple(self, _: object) -> None:
        self._stack.append(tuple(self._items()))

    def _on_list(self, _: object) -> None:
        self._stack.append(self._items())

    def _on_dict(self, _: object) -> None:
        items = self._items()
        self._stack.append(dict(zip(items[::2], items[1::2], strict=True)))

    def _on_frozenset(self, _: object) -> None:
        self._stack.append(frozenset(self._items()))

    def _on_append(self, _: object) -> None:
        item = self._stack.pop()
        self._of(list).append(item)

    def _on_appends(self, _: object) -> None:
        items = self._items()
        self._of(list).extend(items)

    def _on_additems(self, _: object) -> None:
        items = self._items()
        self._of(set).update(items)

    def _on_setitem(self, _: object) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._of(dict)[key] = value

    def _on_setitems(self, _: object) -> None:
        items = self._items()
        self._of(dict).update(zip(items[::2], items[1::2], strict=True))

    def _of(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise TypeError(f"{type(self._stack[-1]).__name__} is no {kind.__name__}")
        return self._stack[-1]

    def _on_global(self, name: str) -> None:
        self._stack.append(self._known(name.replace(" ", ".", 1)))

    def _on_stack_global(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a global is no text")
        self._stack.append(self._known(f"{module}.{name}"))

    def _known(self, name: str) -> Global:
        if name not in self._makers:
            raise UntrustedCheckpointError(
                f"{self._where} asks for {name[:200]}, which is no part of a checkpoint of tensors and plain values; "
                "nothing of it was run"
            )
        return Global(name)

    def _made(self, made_of: object, arguments: object) -> object:
        if not isinstance(made_of, Global) or not isinstance(arguments, tuple):
            raise TypeError("something is made of no global")
        return self._makers[made_of.name](*arguments)

    def _on_reduce(self, _: object) -> None:
        arguments, made_of = self._stack.pop(), self._stack.pop()
        self._stack.append(self._made(made_of, arguments))

    _on_newobj = _on_reduce

    def _on_newobj_ex(self, _: object) -> None:
        if self._stack.pop():
            raise TypeError("named arguments")
        self._on_reduce(None)

    def _on_obj(self, _: object) -> None:
        made_of, *arguments = self._items()
        self._stack.append(self._made(made_of, tuple(arguments)))

    def _on_inst(self, name: str) -> None:
        known = self._known(name.replace(" ", ".", 1))
        self._stack.append(self._made(known, tuple(self._items())))

    def _on_build(self, _: object) -> None:
        state, built = self._stack.pop(), self._stack[-1]
        if isinstance(built, dict):  # attributes of an OrderedDict: torch's versions of modules
            return
        if not isinstance(built, Instance):
            raise TypeError(f"attributes of a {type(built).__name__}")
        built.state = state
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                built.attributes.update((str(name), value) for name, value in part.items())

    def _on_binpersid(self, _: object) -> None:
        self._stack.append(self._persistent(self._stack.pop()))

    def _on_persid(self, name: str) -> None:
        self._stack.append(self._persistent(name))

    def _persistent(self, name: object) -> object:
        if self._stored is None:
            raise ValueError("it speaks of storages that it does not have")
        return self._stored(name)


def read_pickle(
    file: BinaryIO, makers: Mapping[str, Maker], where: str, stored: Callable[[object], object] | None = None
) -> Any:
    """The value of the next pickle in `file`: plain values, and what `makers` make by the names of globals.

    `stored` makes a value of a persistent id. Raises UntrustedCheckpointError for any other global, CheckpointError for
    a damaged pickle.
    """
    try:
        return _Machine(makers, stored, where).run(file)
    except MegatronParmError:
        raise
    except DAMAGE as error:
        raise CheckpointError(f"{where} is damaged or no pickle ({type(error).__name__}: {error})"[:300]) from None
