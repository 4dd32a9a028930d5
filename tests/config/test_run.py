"""config/run.py. Reference: the config itself after a trip through text, and Megatron's default rules."""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_parm.config.fields import Flag, flags_of
from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import SECTIONS, RunConfig, fingerprint, from_dict, resolve, to_dict
from megatron_parm.errors import ConfigError
from tests.config.commands import config_of

MOE = "--num-experts 4 --moe-layer-freq ([0]+[1]) --expert-model-parallel-size 2 --data-path a b --local-rank 1"
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=8)
PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "tokenizer_special_tokens")
PATHS += ("class_names", "freeze", "lr_factor")
SPECIAL = {"moe_pipeline_chunks": st.sampled_from(["auto", "1", "3"])}
SPECIAL["recompute_modules"] = st.lists(st.sampled_from(["moe", "mlp"]))
SPECIAL |= {name: st.lists(TEXT.map("x".__add__)) for name in PATHS}
SPECIAL["rampup_batch_size"] = st.lists(st.integers(1, 99).map(str), max_size=3)
SPECIAL["profile_ranks"] = st.lists(st.integers(0, 7).map(str), max_size=3)


def _number(flag: Flag) -> st.SearchStrategy[object]:
    low = flag.about.at_least if flag.about.at_least is not None else flag.about.above
    high = flag.about.at_most if flag.about.at_most is not None else flag.about.below
    if flag.kind is int:
        return st.integers(int(low or 0), 10**9 if flag.about.at_most is None else int(flag.about.at_most))
    return st.floats(
        low, high, exclude_min=flag.about.above is not None, exclude_max=flag.about.below is not None, allow_nan=False
    ).filter(lambda number: abs(number) != float("inf"))


def _value(flag: Flag) -> st.SearchStrategy[object]:
    if flag.field in SPECIAL:
        found = SPECIAL[flag.field]
    elif flag.choices:
        found = st.sampled_from(flag.choices)
    elif flag.kind is bool:
        found = st.booleans()
    else:
        found = TEXT if flag.kind is str else _number(flag)
    return st.none() | found if flag.is_optional else found


def _settings(owner: type) -> st.SearchStrategy[object]:
    flags = [flag for flag in flags_of(owner) if not flag.about.is_per_rank]
    parts = st.fixed_dictionaries({flag.field: _value(flag) for flag in flags})
    return parts.map(lambda values: owner(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))


def _configs() -> st.SearchStrategy[RunConfig]:
    sections = {name: _settings(owner) for name, owner in SECTIONS.items()}
    experts = sections["moe"].map(lambda moe: dataclasses.replace(moe, num_experts=moe.num_experts or 1))
    sections |= {"moe": st.none() | experts}
    bert, classify = sections["bert"], sections["classify"]
    heads = [(st.none(), st.none()), (bert, st.none()), (bert, classify)]  # of a GPT, a BERT, a classifier
    return st.one_of(
        st.builds(RunConfig, **(sections | {"bert": first, "classify": second})) for first, second in heads
    )


@given(_configs())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_config_survives_yaml_json_and_the_parser(config: RunConfig) -> None:
    values = to_dict(config)
    assert from_dict(values) == config
    assert from_dict(json.loads(json.dumps(values))) == config
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        model = "GPT" if config.bert is None else "BERT" if config.classify is None else "classifier"
        # a checkpoint that --use-checkpoint-args may name says nothing
        read, _ = parse_run_config(["--config", str(path)], model=model, saved=lambda _: {})
        assert read == config


def test_the_text_form_leaves_out_what_belongs_to_one_rank() -> None:
    config = config_of(MOE)
    assert config.parallel.local_rank == 1
    assert "local_rank" not in to_dict(config)
    assert to_dict(config)["data_path"] == ["a", "b"]
    assert "num_experts" not in to_dict(config_of())
    assert from_dict(to_dict(config_of())) == config_of()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layerz": 2}, "unknown setting num_layerz; did you mean --num-layers"),
        ({"num_layers": "2"}, "--num-layers '2'"),
        ({"num_layers": True}, "--num-layers True"),
        ({"lr": -1.0}, "--lr -1.0: must be at least 0"),
        ({"optimizer": "muon"}, "--optimizer muon: not in this release"),
    ],
)
def test_a_text_form_of_another_program_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(to_dict(config_of()) | change)


def test_a_text_form_without_a_required_setting_is_refused() -> None:
    values = to_dict(config_of())
    del values["hidden_size"]
    with pytest.raises(ConfigError, match="--hidden-size"):
        from_dict(values)


def test_fingerprints_differ_exactly_where_settings_differ() -> None:
    one, other = fingerprint(config_of(MOE)), fingerprint(config_of(f"{MOE} --local-rank 0 --seed 7"))
    assert {name for name in one if one[name] != other[name]} == {"--seed"}
    assert one.keys() == fingerprint(config_of()).keys()
    assert one["--data-path"] == "['a', 'b']"
    assert "--local-rank" not in one


def test_defaults_that_depend_on_ranks_are_filled_in() -> None:
    flags = "--num-experts 4 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    config = resolve(config_of(flags), 8)
    assert config.global_batch_size == 2 * 4
    assert config.parallel.expert_tensor_parallel_size == config.esp == 2
    assert config.moe is not None
    assert config.moe.moe_ffn_hidden_size == config.expert_size == config.model.ffn_hidden_size == 128
    assert config.model.kv_channels == 8
    assert resolve(config, 8) == config
    assert resolve(config_of("--tensor-model-parallel-size 2"), 8).parallel.expert_tensor_parallel_size == 1


def test_the_length_of_a_run_in_iterations() -> None:
    assert resolve(config_of(), 1).train_iterations == 4
    in_samples = dataclasses.replace(config_of().training, train_iters=None, train_samples=17, global_batch_size=4)
    assert dataclasses.replace(config_of(), training=in_samples).train_iterations == 4


def test_the_router_is_never_coarser_than_an_fp64_model() -> None:
    assert config_of("--num-experts 4").router_dtype == "fp32"
    assert config_of("--num-experts 4 --precision fp64").router_dtype == "fp64"
