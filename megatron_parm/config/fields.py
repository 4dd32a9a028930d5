"""One field of a settings dataclass = one flag = one help line. Floor 1.

`flag(...)` puts what the type cannot say (help, unit, limits, refused values) into the field's metadata; `flags_of`
joins it with the annotation into `Flag`, which reads text, checks a value and writes its help line. The parser, the
YAML file, `from_dict` and the cross-checks all go through `Flag`, so a value has one meaning wherever it comes from.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from megatron_parm.errors import ConfigError

T = TypeVar("T")

_KEY = "flag"
_KINDS = {int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class About:
    """What a field's annotation cannot say of its flag."""

    help: str
    unit: str = ""
    spelling: str = ""  # where it is not the field's name with dashes
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    zero_means: str = ""
    none_means: str = ""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)  # known value -> reason and remedy
    read: Callable[[Sequence[str]], object] | None = None  # in place of reading by annotation; raises ConfigError
    takes_several: bool = False  # several words, although the value is no list
    is_per_rank: bool = False  # may differ between ranks: not part of a run's identity


@overload
def flag(default: T, *, help: str, **about: Any) -> T: ...
@overload
def flag(*, help: str, **about: Any) -> Any: ...
def flag(default: Any = dataclasses.MISSING, *, help: str, **about: Any) -> Any:
    """A dataclass field that is a flag; without `default` it is required. `about`: the fields of `About`."""
    return dataclasses.field(default=default, metadata={_KEY: About(help=help, **about)})


@dataclass(frozen=True)
class Flag:
    """One flag of one settings class."""

    owner: type
    field: str
    spelling: str
    kind: type  # int, float, str, bool, or tuple for a list of texts
    is_optional: bool
    choices: tuple[str, ...]
    default: object  # dataclasses.MISSING if the flag is required
    about: About

    @property
    def is_required(self) -> bool:
        """True if a run cannot start without it."""
        return self.default is dataclasses.MISSING

    def read(self, words: Sequence[str]) -> object:
        """The value that the words after the flag stand for. Raises ConfigError naming the flag."""
        if self.about.read is not None:
            value = self.about.read(words)
        elif self.kind is tuple:
            value = tuple(words)
        elif len(words) != 1:
            raise ConfigError(f"{self.spelling} takes one value, found {len(words)}: {' '.join(words)}")
        else:
            value = self._read_word(words[0])
        self.check(value)
        return value

    def _read_word(self, word: str) -> object:
        try:
            return self.kind(word)
        except ValueError:
            raise ConfigError(f"{self.spelling} {word}: expected {_KINDS[self.kind]}") from None

    def check(self, value: object) -> None:
        """Check a value's type, choices and limits. Raises ConfigError naming the flag, the value and the rule."""
        if value is None and self.is_optional:
            return
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{self.spelling} {value!r}: expected {_KINDS.get(self.kind, self.kind.__name__)}")
        if isinstance(value, str):
            self._check_choice(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._check_limits(value)

    def _check_choice(self, word: str) -> None:
        if word in self.about.refused:
            raise ConfigError(f"{self.spelling} {word}: {self.about.refused[word]}")
        if self.choices and word not in self.choices:
            raise ConfigError(f"{self.spelling} {word}: use one of {', '.join(self.choices)}")

    def _check_limits(self, number: float) -> None:
        about = self.about
        if not math.isfinite(number):
            raise ConfigError(f"{self.spelling} {number}: expected a finite number")
        for broken, rule in (
            (about.at_least is not None and number < about.at_least, f"at least {about.at_least}"),
            (about.above is not None and number <= about.above, f"greater than {about.above}"),
            (about.at_most is not None and number > about.at_most, f"at most {about.at_most}"),
            (about.below is not None and number >= about.below, f"less than {about.below}"),
        ):
            if broken:
                raise ConfigError(f"{self.spelling} {number}: must be {rule}")

    def help_line(self) -> str:
        """The help text with choices, unit and default."""
        about = self.about
        parts = [about.help]
        if self.choices:
            parts.append("{" + ",".join(self.choices) + "}")
        if about.unit:
            parts.append(f"[{about.unit}]")
        zero = f"0 = {about.zero_means}; " if about.zero_means else ""
        return " ".join(parts) + f" ({zero}{self._default_text()})"

    def _default_text(self) -> str:
        if self.is_required and not self.about.none_means:
            return "required"
        if self.kind is bool:
            return "default off"
        if self.is_required or self.default is None or self.default == ():
            return f"default: {self.about.none_means or 'none'}"
        return f"default {self.default}"


def spelling_of(field: str) -> str:
    """A field's name as a flag."""
    return "--" + field.replace("_", "-")


def flags_of(owner: type) -> tuple[Flag, ...]:
    """The flags of a settings class, in its own order."""
    hints = typing.get_type_hints(owner)
    found = []
    for field in dataclasses.fields(owner):
        about = field.metadata[_KEY]
        kind, is_optional, choices = _read_annotation(hints[field.name])
        spelling = about.spelling or spelling_of(field.name)
        found.append(Flag(owner, field.name, spelling, kind, is_optional, choices, field.default, about))
    return tuple(found)


def _read_annotation(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    present = [member for member in members if member is not types.NoneType]
    assert len(present) == 1, f"a flag has one type, found {hint}"
    is_optional = len(present) < len(members)
    if typing.get_origin(present[0]) is typing.Literal:
        return str, is_optional, typing.get_args(present[0])
    return typing.get_origin(present[0]) or present[0], is_optional, ()


def check_fields(settings: object) -> None:
    """Check every field of a settings dataclass by type, choices and limits. Raises ConfigError."""
    for one in flags_of(type(settings)):
        one.check(getattr(settings, one.field))


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """The known names that `name` was probably meant to be, best first, at most two."""
    return difflib.get_close_matches("--" + name.lstrip("-").replace("_", "-"), list(dict.fromkeys(known)), n=2)
