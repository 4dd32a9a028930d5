"""Pickles read as data. Reference: Python's own unpickler for plain values; for hostile ones, that nothing happens."""

import argparse
import io
import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from megatron_parm.checkpoint.pickle_values import Instance, instances_of, read_pickle
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError

PLAIN: list[Any] = [
    None, True, False, 0, -1, 255, 256, 65536, -(2**31), 2**31, 2**70, -(2**2050), 1.5, -0.0, float("inf"), "", "text",
    "ü\n\\ \ud800", "x" * 300, b"", b"bytes", b"y" * 300, [], [1], list(range(2000)), (), (1,), (1, 2), (1, 2, 3),
    (1, 2, 3, 4), {}, {"a": [1, {"b": (2.0, None)}], 3: "c"}, {str(i): i for i in range(2000)},
]  # fmt: skip
TABLE = {"collections.OrderedDict": dict, "_codecs.encode": lambda text, code: text.encode("latin1")} | instances_of(
    "argparse.Namespace"
)


def _read(data: bytes) -> Any:
    return read_pickle(io.BytesIO(data), TABLE, "the file")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_those_of_python(protocol: int) -> None:
    shared = [1, 2]
    for value in (*PLAIN, PLAIN, [shared, shared]):
        if protocol < 3 and value == b"":  # which Python makes by a call
            continue
        data = pickle.dumps([value], protocol).replace(b"c__builtin__\nbytes\n(tR", b"")
        if protocol < 3 and value is PLAIN:
            continue
        found = _read(data)
        assert repr(found) == repr([value]) and type(found[0]) is type(value)
    twice = _read(pickle.dumps([shared, shared], protocol))
    assert twice[0] is twice[1]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_namespace_is_its_attributes(protocol: int) -> None:
    ordered = OrderedDict(b=1, a=2)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]  # as torch's states of modules have
    found = _read(pickle.dumps({"args": argparse.Namespace(x=1, y=[2]), "state": ordered}, protocol))
    assert isinstance(found["args"], Instance) and found["args"].attributes == {"x": 1, "y": [2]}
    assert list(found["state"].items()) == [("b", 1), ("a", 2)]


class _Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that make the folder `marker` in Python's unpickler, with the global that must be named."""
    make = f"__import__('os').mkdir({str(marker)!r})"
    found: dict[str, tuple[bytes, str]] = {}
    for protocol in (0, 2, 4):
        builtins = "__builtin__" if protocol < 3 else "builtins"
        for name, call, asked in (
            ("system", _Calls(os.system, f"mkdir {marker}"), f"{os.name}.system"),
            ("eval", _Calls(eval, make), f"{builtins}.eval"),
            ("exec", _Calls(exec, make), f"{builtins}.exec"),
            ("mkdir", _Calls(os.mkdir, str(marker)), f"{os.name}.mkdir"),
            ("getattr", _Calls(getattr, _Calls(__import__, "os"), "mkdir"), f"{builtins}.getattr"),
            ("load", _Calls(pickle.loads, pickle.dumps(_Calls(os.mkdir, str(marker)))), "pickle.loads"),
        ):
            value = {"args": {"x": [1, call]}, "model": {}}
            found[f"{name} {protocol}"] = pickle.dumps(value, protocol), asked
    found["inst"] = f"(S'mkdir {marker}'\nios\nsystem\n.".encode(), "os.system"
    found["obj"] = f"(cos\nmkdir\nS'{marker}'\no.".encode(), "os.mkdir"
    found["newobj"] = "\x80\x02cos\nmkdir\nX\x01\x00\x00\x00a\x85\x81.".encode("latin1"), "os.mkdir"
    found["dotted"] = pickle.dumps(1, 4)[:-3] + b"\x8c\x08argparse\x8c\x0c_sys.exit.no\x93.", "argparse._sys.exit.no"
    return found


@pytest.mark.parametrize("name", hostile(Path("x")))
def test_a_call_is_refused_by_its_name_and_not_made(tmp_path: Path, name: str) -> None:
    data, asked = hostile(tmp_path / "marker")[name]
    with pytest.raises(UntrustedCheckpointError, match="the file asks for ") as caught:
        _read(data)
    assert asked in str(caught.value) and "nothing of it was run" in str(caught.value)
    assert not (tmp_path / "marker").exists()


def test_the_same_pickles_run_in_python(tmp_path: Path) -> None:
    """The negative control: the payloads are live."""
    for name in ("system 2", "eval 4", "mkdir 0", "inst", "obj"):
        marker = tmp_path / name.replace(" ", "")
        pickle.loads(hostile(marker)[name][0])
        assert marker.exists(), name


def test_allowed_names_are_no_functions() -> None:
    """A table's rows make plain values: attributes of a class cannot be set, and what was made cannot be called."""
    sets = b"cargparse\nNamespace\n(dS'__init__'\ncargparse\nNamespace\nsb."
    with pytest.raises(CheckpointError, match="attributes of a Global"):
        _read(sets)
    with pytest.raises(CheckpointError, match="something is made of no global"):
        _read(b"cargparse\nNamespace\n(tR(tR.")
    with pytest.raises(UntrustedCheckpointError, match="opcode EXT1"):
        _read(b"\x80\x02\x82\x01.")


def test_damage_anywhere_is_one_kind_of_error(tmp_path: Path) -> None:
    """Every cut, and a thousand changed bytes: a value or a CheckpointError, never another exception."""
    marker = tmp_path / "marker"
    value = {"args": argparse.Namespace(x=[1, (2, "three")], y={"z": 1.5}), "ordered": OrderedDict(a=1), "s": {4, 5}}
    sound = pickle.dumps(value, 4)
    chance = random.Random(0)
    for cut in range(len(sound)):
        with pytest.raises(CheckpointError):
            _read(sound[:cut])
    calls = [hostile(marker)[name][0] for name in ("eval 2", "mkdir 4", "inst")]
    for _ in range(1000):
        data = bytearray(chance.choice([sound, *calls]))
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            _read(bytes(data))
        except CheckpointError:
            continue
    assert not marker.exists()
