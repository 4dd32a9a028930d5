"""A YAML file of flags, turned into the words of a command line. Floor 1.

Keys are flag names, with - or _; the values' own text is read by the flags, so `lr: 1e-4` and `progress_bar: off` mean
what they say. Only plain values and lists of them: no objects, no nesting, no key twice.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import yaml

from megatron_parm.config.fields import nearest_names
from megatron_parm.errors import ConfigError

LARGEST_FILE = 1 << 20  # bytes

Takes = Literal["nothing", "one", "several", "anything"]  # anything: a switch, or a flag with words

_TRUE = ("true", "yes", "on")
_BOOL_TAG = "tag:yaml.org,2002:bool"
_NULL_TAG = "tag:yaml.org,2002:null"


def words_of_file(path: str, known: Mapping[str, Takes]) -> list[str]:
    """The file as command-line words; `known` says what each flag takes. Raises ConfigError naming the file."""
    try:
        return _words_of_mapping(_compose(path), known)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is not valid YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"--config {path}: nested too deeply; write one flag a line, key: value") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _compose(path: str) -> yaml.Node | None:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"is larger than {LARGEST_FILE} bytes; a file of flags never is")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text") from None
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    return node


def _words_of_mapping(node: yaml.Node | None, known: Mapping[str, Takes]) -> list[str]:
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError("expected one flag a line, key: value")
    words: list[str] = []
    seen: set[str] = set()
    for key, value in node.value:
        flag = _flag_of_key(key, known)
        if flag in seen:
            raise ConfigError(f"line {key.start_mark.line + 1}: {key.value} is there twice")
        seen.add(flag)
        words += _words_of_value(flag, value, known[flag])
    return words


def _flag_of_key(key: yaml.Node, known: Mapping[str, Takes]) -> str:
    line = key.start_mark.line + 1
    if not isinstance(key, yaml.ScalarNode):
        raise ConfigError(f"line {line}: a key must be a flag's name")
    name = key.value.removeprefix("--")
    for flag in (f"--{name}", "--" + name.replace("_", "-")):
        if flag in known:
            return flag
    raise ConfigError(f"line {line}: unknown key {key.value}{did_you_mean(key.value, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of a message about an unknown name."""
    near = nearest_names(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else "; --help lists the flags"


def _words_of_value(flag: str, node: yaml.Node, takes: Takes) -> list[str]:
    if node.tag == _NULL_TAG:
        return []
    is_switch = node.tag == _BOOL_TAG and takes in ("nothing", "anything")
    if is_switch:
        return [flag] if node.value.lower() in _TRUE else []
    if takes == "nothing":
        raise ConfigError(f"line {node.start_mark.line + 1}: {flag} is a switch: write true or false")
    entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(entry, yaml.ScalarNode) for entry in entries):
        raise ConfigError(f"line {node.start_mark.line + 1}: {flag} takes a value or a list of values")
    words = [entry.value for entry in entries]
    if len(words) == 1:
        return [f"{flag}={words[0]}"]
    if takes == "one":
        raise ConfigError(f"line {node.start_mark.line + 1}: {flag} takes one value, found {len(words)}")
    if any(word.startswith("-") for word in words):
        raise ConfigError(f"line {node.start_mark.line + 1}: a value in the list of {flag} starts with -")
    return [flag, *words]
