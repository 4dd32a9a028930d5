"""Settings classes -> argparse -> settings, with a YAML file under the flags. Floor 1.

The only place besides parallel/launch.py that reads argv. A flag's value is read by `Flag`, whatever its source; other
spellings, ignored and refused names come from the one table in megatron_flags.py.
"""

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeVar

from megatron_parm import __version__
from megatron_parm.config import checks_activations
from megatron_parm.config.bert import BertConfig
from megatron_parm.config.checks import remarks
from megatron_parm.config.checks_checkpoint import checkpoint_remarks
from megatron_parm.config.checks_replicas import replica_remarks
from megatron_parm.config.checks_router import router_remarks
from megatron_parm.config.classify import ClassifyConfig
from megatron_parm.config.config_file import Takes, did_you_mean, words_of_file
from megatron_parm.config.fields import Flag, flags_of
from megatron_parm.config.megatron_flags import MEGATRON_FLAGS, Entry, Ignored, Refused, Sets, Spelling
from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.run import SECTIONS, RunConfig, run_from_sections
from megatron_parm.errors import ConfigError

S = TypeVar("S")
ModelKind = Literal["GPT", "BERT", "classifier"]
ReadSaved = Callable[[Mapping[str, object]], Mapping[str, object]]

_NARGS: dict[Takes, int | str | None] = {"nothing": 0, "one": None, "several": "*", "anything": "*"}
_TAKES: dict[str, Takes] = {"none": "nothing", "one": "one", "any": "anything"}
# sections of some kinds of model alone: which, and what another kind says of their flags
_KINDS: dict[type, tuple[tuple[ModelKind, ...], str]] = {
    BertConfig: (("BERT", "classifier"), "a flag of pretrain_bert.py; leave it out for a GPT"),
    ClassifyConfig: (("classifier",), "a flag of finetune_bert.py, which trains a classifier; leave it out"),
}
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


@dataclass
class Given:
    """What one source (the file, or the command line) says."""

    values: dict[str, object] = field(default_factory=dict)  # by field
    spellings: dict[str, str] = field(default_factory=dict)  # by field: the flag that was written
    yields: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by field: values that the flag gives way to
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, spelling: str, value: object, yields_to: tuple[str, ...] = ()) -> None:
        """Keep a value. The same flag twice: the last counts; two names of one field must agree, or one give way."""
        before = self.spellings.get(name)
        is_other_name = before is not None and before != spelling and self.values[name] != value
        if is_other_name and self.values[name] in yields_to:
            return
        if is_other_name and value not in self.yields[name]:
            raise ConfigError(
                f"{before} and {spelling} are two names of one setting and say {self.values[name]} and {value}; "
                "keep one"
            )
        self.values[name] = value
        self.spellings[name] = spelling
        self.yields[name] = yields_to

    def note(self, text: str) -> None:
        """Keep a note once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Settings:
    """The settings that a command line and its file stand for."""

    sections: dict[type, Any]  # MoEConfig -> None for a dense model
    notes: list[str]
    namespace: argparse.Namespace  # the flags that a tool added itself

    def of(self, owner: type[S]) -> S:
        """The settings of one class."""
        found = self.sections[owner]
        assert isinstance(found, owner), f"no {owner.__name__}"
        return found


class _Help(argparse.HelpFormatter):
    """Help lines that never break inside a flag's name."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class ConfigParser(argparse.ArgumentParser):
    """An argparse parser of settings classes; raises ConfigError in one line where argparse would print its usage."""

    def __init__(self, prog: str | None, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage="%(prog)s --flag value ...",
            epilog="Megatron's other flags are accepted with a note where results do not depend on them, else refused.",
            allow_abbrev=False,
            formatter_class=lambda prog: _Help(prog, max_help_position=40, width=118),
        )
        self.known: dict[str, Takes] = {}
        self.add_argument("--config", metavar="FILE", help="YAML file of flags; flags on the command line win over it")
        self.add_argument("--version", action="version", version=f"megatron_parm {__version__}")

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(message.removeprefix("argument "))

    def learn(self, group: Any, spelling: str, action: type[argparse.Action], takes: Takes, **about: Any) -> None:
        """Add a flag of ours to `group`, and remember what it takes for the file."""
        self.known[spelling] = takes
        group.add_argument(
            spelling, action=action, nargs=_NARGS[takes], dest="given", default=argparse.SUPPRESS, **about
        )

    def read(self, words: Sequence[str]) -> tuple[Given, argparse.Namespace]:
        """Read one source. Raises ConfigError for an unknown flag, naming the nearest known one."""
        given = Given()
        namespace, rest = self.parse_known_args(list(words), argparse.Namespace(given=given))
        unknown = [word.split("=")[0] for word in rest if word.startswith("--") and word != "--"]
        if unknown:
            raise ConfigError(f"unknown flag {unknown[0]}{did_you_mean(unknown[0], self._usable())}")
        if rest:
            raise ConfigError(f"unexpected {rest[0]!r}: every setting is a --flag; --help lists them")
        return given, namespace

    def _usable(self) -> list[str]:
        """Every flag worth proposing, those of a tool included."""
        every = (option for action in self._actions for option in action.option_strings)
        return [option for option in every if not isinstance(MEGATRON_FLAGS.get(option), Refused)]


class _FlagAction(argparse.Action):
    """Reads a field's value; `const` is (flag, how the table translates the text or None)."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, spelling: str | None = None) -> None:
        flag, entry = self.const
        assert isinstance(flag, Flag)
        given: Given = namespace.given
        name = spelling or flag.spelling
        flag = dataclasses.replace(flag, spelling=name)  # messages name what was written
        if isinstance(entry, Sets):
            value = flag.default if entry.value is None else flag.read([entry.value])
        elif flag.kind is bool:
            value = True
        else:
            words = [values] if isinstance(values, str) else list(values)
            if isinstance(entry, Spelling) and entry.convert is not None:
                words = [entry.convert(word) for word in words]
            value = flag.read(words)
        given.add(flag.field, name, value, entry.yields_to if isinstance(entry, Sets) else ())


class _TableAction(argparse.Action):
    """An ignored or refused name; `const` is its entry."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, spelling: str | None = None) -> None:
        given: Given = namespace.given
        words = [values] if isinstance(values, str) else list(values or ())
        if isinstance(self.const, Ignored):
            given.note(f"{spelling} is accepted and ignored: {self.const.instead}")
            return
        assert isinstance(self.const, Refused)
        if not words or any(word not in self.const.harmless for word in words):
            raise ConfigError(f"{' '.join([str(spelling), *words])}: {self.const.reason}")


def _takes(flag: Flag) -> Takes:
    if flag.kind is bool:
        return "nothing"
    return "several" if flag.kind is tuple or flag.about.takes_several else "one"


def build_parser(
    classes: Iterable[type],
    *,
    prog: str | None = None,
    description: str | None = None,
    knows_megatron: bool = False,
) -> ConfigParser:
    """A parser of the flags of `classes`, with their other spellings.

    `knows_megatron` adds every ignored and refused name of Megatron too. A tool may add arguments of its own.
    """
    parser = ConfigParser(prog, description)
    other_names = _other_names()
    flags: dict[str, Flag] = {}
    for owner in classes:
        group = parser.add_argument_group((owner.__doc__ or owner.__name__).split(".")[0])
        for flag in flags_of(owner):
            flags[flag.field] = flag
            metavar = None if flag.kind is bool else {"metavar": _METAVARS[flag.kind]}
            text = (flag.help_line() + other_names.get(flag.field, "")).replace("%", "%%")
            parser.learn(
                group, flag.spelling, _FlagAction, _takes(flag), const=(flag, None), help=text, **(metavar or {})
            )
    for spelling, entry in MEGATRON_FLAGS.items():
        _learn_entry(parser, spelling, entry, flags, knows_megatron)
    return parser


def _other_names() -> dict[str, str]:
    found: dict[str, str] = {}
    for spelling, entry in MEGATRON_FLAGS.items():
        if isinstance(entry, Spelling):
            found[entry.field] = f"{found[entry.field]}, {spelling}" if entry.field in found else f"; also {spelling}"
    return found


def _learn_entry(
    parser: ConfigParser, spelling: str, entry: Entry, flags: dict[str, Flag], knows_megatron: bool
) -> None:
    hidden = argparse.SUPPRESS
    if isinstance(entry, Spelling | Sets):
        if entry.field in flags:
            flag = flags[entry.field]
            takes: Takes = "nothing" if isinstance(entry, Sets) else _takes(flag)
            parser.learn(parser, spelling, _FlagAction, takes, const=(flag, entry), help=hidden)
    elif knows_megatron:
        parser.learn(parser, spelling, _TableAction, _TAKES[entry.values], const=entry, help=hidden)


def read_settings(
    parser: ConfigParser, argv: Sequence[str] | None, classes: Sequence[type], saved: ReadSaved | None = None
) -> Settings:
    """Read argv (None: this process's own) over the file it may name, and over a checkpoint's if asked for.

    saved: from what is given to the settings of the checkpoint that it names. Raises ConfigError.
    """
    given, namespace = parser.read(sys.argv[1:] if argv is None else argv)
    if namespace.config is not None:
        given = _over(_read_file(parser, namespace.config), given)
    if given.values.get("use_checkpoint_args"):
        if saved is None:
            raise ConfigError("--use-checkpoint-args: not for this command; repeat the model's flags")
        given = _over(_from_checkpoint(saved(given.values), given, classes), given)
    sections: dict[type, Any] = {}
    missing: list[str] = []
    for owner in classes:
        if owner is MoEConfig and not given.values.get("num_experts"):
            sections[owner] = None
            _note_unused(given)
            continue
        flags = flags_of(owner)
        missing += [flag.spelling for flag in flags if flag.is_required and flag.field not in given.values]
        if not missing:
            sections[owner] = owner(**{f.field: given.values[f.field] for f in flags if f.field in given.values})
    if missing:
        raise ConfigError(f"{', '.join(missing)}: required, but not given; --help says what each means")
    return Settings(sections, given.notes, namespace)


def _read_file(parser: ConfigParser, path: str) -> Given:
    words = words_of_file(path, parser.known)
    try:
        return parser.read(words)[0]
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _from_checkpoint(saved: Mapping[str, object], given: Given, classes: Sequence[type]) -> Given:
    """Those of the saved settings that this command knows and that are not given."""
    found = Given()
    for owner in classes:
        for flag in flags_of(owner):
            if flag.field in saved and flag.field not in given.values:
                value = saved[flag.field]
                value = tuple(value) if isinstance(value, list) else value
                flag.check(value)
                found.add(flag.field, flag.spelling, value)
    told = ", ".join(f"{found.spellings[name]} {value}" for name, value in found.values.items())
    found.note(f"from the checkpoint: {told}" if told else "--use-checkpoint-args: nothing was taken from a checkpoint")
    return found


def _over(file: Given, line: Given) -> Given:
    merged = Given(file.values | line.values, file.spellings | line.spellings, notes=list(file.notes))
    for text in line.notes:
        merged.note(text)
    return merged


def _note_unused(given: Given) -> None:
    names = {field.name for field in dataclasses.fields(MoEConfig)} - {"num_experts"}
    unused = [spelling for name, spelling in given.spellings.items() if name in names]
    if unused:
        given.note(f"{', '.join(unused)}: no effect without --num-experts")


def parse_run_config(
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    model: ModelKind = "GPT",
    saved: ReadSaved | None = None,
) -> tuple[RunConfig, list[str]]:
    """A whole run's settings and the notes to print once; saved: see `read_settings`.

    Raises ConfigError; `--help` and `--version` exit.
    """
    foreign = {owner: reason for owner, (kinds, reason) in _KINDS.items() if model not in kinds}
    classes = tuple(owner for owner in SECTIONS.values() if owner not in foreign)
    text = f"Train a {model} with or without experts."
    parser = build_parser(classes, prog=prog, description=text, knows_megatron=True)
    for owner, reason in foreign.items():
        for flag in flags_of(owner):
            parser.learn(parser, flag.spelling, _TableAction, "anything", const=Refused(reason), help=argparse.SUPPRESS)
    settings = read_settings(parser, argv, classes, saved)
    config = run_from_sections(settings.sections)
    notes = [
        *settings.notes,
        *checkpoint_remarks(config.checkpoint),
        *remarks(config.model, config.parallel, config.moe),
    ]
    notes += replica_remarks(
        config.replicas, config.loss_scale, config.training.precision, is_moe=config.moe is not None
    )
    notes += checks_activations.remarks(config.recompute, config.training, config.moe is not None)
    return config, notes if config.moe is None else [*notes, *router_remarks(config.moe)]
