"""config/fields.py. Reference: the rules of the flag written beside each case."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import pytest

from megatron_parm.config.fields import Flag, check_fields, flag, flags_of, nearest_names
from megatron_parm.config.run import SECTIONS
from megatron_parm.errors import ConfigError

ALL_FLAGS = [one for section in SECTIONS.values() for one in flags_of(section)]


@dataclass(frozen=True, kw_only=True)
class Oven:
    """An oven."""

    degrees: int = flag(help="heat", unit="C", at_least=0, at_most=300)
    minutes: float = flag(10.0, help="time", unit="minutes", above=0, zero_means="never")
    mode: Literal["fan", "grill"] = flag("fan", help="kind of heat", refused={"steam": "no water tank; use fan"})
    note: str | None = flag(None, help="a note", none_means="no note")
    is_loud: bool = flag(False, help="beep")


OVEN = {one.field: one for one in flags_of(Oven)}


def test_the_annotation_gives_type_choices_and_default() -> None:
    assert OVEN["degrees"].is_required
    assert OVEN["mode"].choices == ("fan", "grill")
    assert OVEN["note"].is_optional
    assert not OVEN["minutes"].is_optional
    assert OVEN["is_loud"].spelling == "--is-loud"


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [("degrees", ["200"], 200), ("minutes", ["1e-4"], 1e-4), ("mode", ["grill"], "grill"), ("note", [""], "")],
)
def test_words_are_read_by_the_type(name: str, words: list[str], value: object) -> None:
    found = OVEN[name].read(words)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "word", "message"),
    [
        ("degrees", "hot", "--degrees hot: expected a whole number"),
        ("degrees", "1.5", "--degrees 1.5: expected a whole number"),
        ("degrees", "-1", "--degrees -1: must be at least 0"),
        ("degrees", "301", "--degrees 301: must be at most 300"),
        ("minutes", "0", "--minutes 0.0: must be greater than 0"),
        ("minutes", "nan", "--minutes nan: expected a finite number"),
        ("minutes", "inf", "--minutes inf: expected a finite number"),
        ("mode", "boil", "--mode boil: use one of fan, grill"),
        ("mode", "steam", "--mode steam: no water tank; use fan"),
    ],
)
def test_an_unsuitable_word_is_one_line_with_flag_value_and_rule(name: str, word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        OVEN[name].read([word])
    assert str(error.value) == message


def test_check_fields_guards_settings_made_without_the_parser() -> None:
    check_fields(Oven(degrees=20))
    with pytest.raises(ConfigError, match="--degrees 500: must be at most 300"):
        check_fields(Oven(degrees=500))
    with pytest.raises(ConfigError, match="--degrees '20'"):
        check_fields(Oven(degrees="20"))


def test_the_help_line_has_choices_unit_and_default() -> None:
    assert OVEN["degrees"].help_line() == "heat [C] (required)"
    assert OVEN["minutes"].help_line() == "time [minutes] (0 = never; default 10.0)"
    assert OVEN["mode"].help_line() == "kind of heat {fan,grill} (default fan)"
    assert OVEN["note"].help_line() == "a note (default: no note)"


@pytest.mark.parametrize("one", ALL_FLAGS, ids=lambda one: one.spelling)
def test_every_flag_has_help_and_a_default_that_it_accepts(one: Flag) -> None:
    assert one.about.help
    assert one.help_line().endswith(")")
    if not one.is_required:
        one.check(one.default)
    if one.is_optional:
        assert one.default is None, "null in a file means: the default"
    if one.kind is bool:
        assert one.default is False, "Megatron's switches are store-true"


def test_no_two_fields_share_a_name() -> None:
    assert len({one.field for one in ALL_FLAGS}) == len(ALL_FLAGS)
    assert len({one.spelling for one in ALL_FLAGS}) == len(ALL_FLAGS)


def test_sections_are_frozen() -> None:
    for section in SECTIONS.values():
        assert dataclasses.is_dataclass(section)
        assert section.__dataclass_params__.frozen


def test_nearest_names_forgive_a_letter_and_underscores() -> None:
    known = ["--num-layers", "--num-experts", "--save"]
    assert nearest_names("--num-layerz", known)[0] == "--num-layers"
    assert nearest_names("num_layers", known)[0] == "--num-layers"
    assert nearest_names("--zzz", known) == []
