"""config/parser.py and config/config_file.py. Reference: the commands and files written beside each case."""

from pathlib import Path

import pytest
import yaml

from megatron_parm.config.config_file import LARGEST_FILE
from megatron_parm.config.logs import LoggingConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.parser import build_parser, parse_run_config, read_settings
from megatron_parm.config.run import RunConfig, check_run
from megatron_parm.errors import ConfigError
from tests.config.commands import TINY, config_of, notes_of

CLASSIC = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 8
--seq-length 32 --max-position-embeddings 32 --train-iters 500 --lr-decay-iters 320 --save ckpt --load ckpt
--data-path my_gpt_text_document --vocab-file vocab.json --merge-file merges.txt --data-impl mmap --split 949,50,1
--distributed-backend nccl --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0
--lr-warmup-fraction .01 --checkpoint-activations --log-interval 100 --save-interval 10000 --eval-interval 1000
--eval-iters 10 --DDP-impl local --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --local_rank=1
--no-masked-softmax-fusion --layernorm-epsilon 1e-5"""

CURRENT = """--use-mcore-models --disable-bias-linear --seq-length 32 --max-position-embeddings 64 --num-layers 4
--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type
GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --data-path data --split 99990,8,2 --micro-batch-size 1
--global-batch-size 4 --lr 1e-4 --train-iters 50 --lr-decay-iters 32 --lr-decay-style cosine --min-lr 1.0e-5
--weight-decay 0.1 --lr-warmup-iters 5 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 2
--pipeline-model-parallel-size 1 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1
--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 1000 --eval-interval 100
--eval-iters 10 --save ckpt --load ckpt --tensorboard-dir tb --ckpt-format torch_dist --no-load-optim --no-load-rng"""


def file_with(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def with_file(tmp_path: Path, text: str, extra: str = "") -> RunConfig:
    return parse_run_config([*TINY, "--config", file_with(tmp_path, text), *extra.split()])[0]


def test_a_command_of_2021_runs() -> None:
    config, notes = parse_run_config(CLASSIC.split())
    check_run(config, 4)
    assert config.model.norm_epsilon == 1e-5
    assert config.parallel.local_rank == 1
    assert config.recompute.is_full
    assert config.parallel.distributed_backend == "nccl"
    assert config.data.tokenizer_type == "GPT2BPETokenizer"
    assert [note.split()[0] for note in notes] == [
        "--DDP-impl",
        "--no-masked-softmax-fusion",
    ]


def test_a_command_of_today_runs() -> None:
    config, notes = parse_run_config(CURRENT.split())
    check_run(config, 8)
    assert config.moe is not None
    assert config.moe.moe_aux_loss_coeff == 0.01
    assert config.model.position_embedding_type == "rope"
    assert config.training.precision == "bf16"
    assert len(notes) == 5


def test_two_names_of_one_setting_must_agree() -> None:
    assert config_of("--bf16 --precision bf16").training.precision == "bf16"
    with pytest.raises(ConfigError, match="--bf16 and --precision are two names of one setting and say bf16 and fp64"):
        config_of("--bf16 --precision fp64")


@pytest.mark.parametrize("rope", ["--position-embedding-type rope", "--use-rotary-position-embeddings"])
def test_no_position_embedding_means_no_learned_one_beside_rope(rope: str) -> None:
    """Scripts of today carry both."""
    assert config_of(f"--no-position-embedding {rope}").model.position_embedding_type == "rope"
    assert config_of(f"{rope} --no-position-embedding").model.position_embedding_type == "rope"
    assert config_of("--no-position-embedding").model.position_embedding_type == "none"
    with pytest.raises(ConfigError, match="two names of one setting"):
        config_of("--no-position-embedding --position-embedding-type learned_absolute")


def test_the_last_of_one_flag_counts() -> None:
    assert config_of("--lr 1 --lr 2").optim.lr == 2.0


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("--num-layerz 3", "unknown flag --num-layerz; did you mean --num-layers"),
        ("--num_layers 3", "unknown flag --num_layers; did you mean --num-layers"),
        ("--micro-batch 3", "unknown flag --micro-batch; did you mean --micro-batch-size"),
        ("--xyzzy=3", "unknown flag --xyzzy; --help lists the flags"),
        ("stray", "unexpected 'stray'"),
        ("--num-layers", "--num-layers: expected one argument"),
        ("--num-layers two", "--num-layers two: expected a whole number"),
        ("--layernorm-epsilon x", "--layernorm-epsilon x: expected a number"),
        ("--swiglu=yes", "--swiglu: ignored explicit argument 'yes'"),
        ("--num-experts-switch 4", "--num-experts-switch 4: use --num-experts"),
    ],
)
def test_a_wrong_word_is_one_line(written: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config_of(written)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_missing_flags_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"--num-layers, --hidden-size, .*--lr, --micro-batch-size: required"):
        parse_run_config([])


def test_help_lists_every_group_with_unit_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_run_config(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--seq-length N" in text
    assert "length of a sample [tokens] (required)" in text
    assert "Console, JSON lines, TensorBoard, wandb and timeline:" in text
    assert "--moe-cost-model TEXT" in text
    assert "--bert-layout" not in text, "a name that is refused"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_run_config(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("megatron_parm ")


def test_argv_is_read_when_nothing_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *TINY])
    assert parse_run_config()[0] == config_of()


def test_a_file_lies_under_the_flags(tmp_path: Path) -> None:
    text = "lr: 1e-2\nmin_lr: 1e-5\nclip-grad: 2\nswiglu: true\nopenai_gelu: false\nprogress_bar: off\nload: null\n"
    config = with_file(tmp_path, text, "--clip-grad 3")
    assert config.optim.clip_grad == 3.0
    assert config.optim.lr == 1e-3, "the command line says 1e-3"
    assert config.model.swiglu
    assert not config.model.openai_gelu
    assert config.logging.progress_bar == "off"
    assert config.checkpoint.load is None


def test_a_file_may_hold_old_and_ignored_names(tmp_path: Path) -> None:
    path = file_with(
        tmp_path, "bf16: true\nDDP-impl: local\nlayernorm_epsilon: 1e-6\noverride_opt_param_scheduler: true"
    )
    config, notes = parse_run_config([*TINY, "--config", path])
    assert config.training.precision == "bf16"
    assert config.model.norm_epsilon == 1e-6
    assert config.optim.override_opt_param_scheduler
    assert [note.split()[0] for note in notes] == ["--DDP-impl"]


def test_false_switches_off_even_what_is_refused(tmp_path: Path) -> None:
    assert with_file(tmp_path, "fp16: false\nasync_save: false\nswiglu: no") == config_of()


def test_flags_win_over_the_file_even_by_another_name(tmp_path: Path) -> None:
    assert with_file(tmp_path, "bf16: true", "--precision fp32").training.precision == "fp32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layerz: 3", "line 1: unknown key num_layerz; did you mean --num-layers"),
        ("seed: 1\nseed: 2", "line 2: seed is there twice"),
        ("save_interval: 1\nsave-interval: 2", "line 2: save-interval is there twice"),
        ("model:\n  num_layers: 2", "line 1: unknown key model"),
        ("seed:\n  num_layers: 2", "line 2: --seed takes a value or a list of values"),
        ("seed: [1, 2]", "line 1: --seed takes one value, found 2"),
        ("swiglu: 1", "line 1: --swiglu is a switch: write true or false"),
        ("data_path: [a, -b]", "line 1: a value in the list of --data-path starts with -"),
        ("- seed", "expected one flag a line, key: value"),
        ("seed: [1", "is not valid YAML"),
        ("seed: x", "--seed x: expected a whole number"),
        ("num-experts-switch: 4", "--num-experts-switch 4: use --num-experts"),
        ("config: other.yaml", "line 1: unknown key config"),
        ("? [a]\n: 1", "line 1: a key must be a flag's name"),
        ("seed: !!python/object/apply:os.system ['true']", "--seed true: expected a whole number"),
        ("<<: {seed: 1}", "line 1: unknown key <<"),
        ("[" * 1200, "nested too deeply"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_file(tmp_path, text)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_a_file_of_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config_of(f"--config {tmp_path / 'none.yaml'}")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config_of(f"--config {tmp_path}")
    with pytest.raises(ConfigError, match=f"larger than {LARGEST_FILE} bytes"):
        with_file(tmp_path, "#" * (LARGEST_FILE + 1))
    (tmp_path / "latin.yaml").write_bytes(b"save: \xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        config_of(f"--config {tmp_path / 'latin.yaml'}")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert with_file(tmp_path, "") == config_of()


def test_a_list_in_a_file(tmp_path: Path) -> None:
    assert with_file(tmp_path, yaml.safe_dump({"data_path": ["a", "b"]})).data.data_path == ("a", "b")
    assert with_file(tmp_path, "data_path: one").data.data_path == ("one",)


def test_a_tool_takes_some_sections() -> None:
    classes = [ParallelConfig, MoEConfig, LoggingConfig]
    found = read_settings(build_parser(classes), ["--tensor-model-parallel-size", "2"], classes)
    assert found.sections == {
        ParallelConfig: ParallelConfig(tensor_model_parallel_size=2),
        MoEConfig: None,
        LoggingConfig: LoggingConfig(),
    }


def test_a_tool_adds_flags_of_its_own() -> None:
    parser = build_parser([ParallelConfig], description="Show a layout.")
    parser.add_argument("--world", type=int, default=1)
    settings = read_settings(parser, ["--world", "8", "--local_rank", "0"], [ParallelConfig])
    assert settings.namespace.world == 8
    assert settings.of(ParallelConfig).local_rank == 0
    with pytest.raises(ConfigError, match="unknown flag --wrld; did you mean --world"):
        read_settings(parser, ["--wrld", "8"], [ParallelConfig])
    with pytest.raises(ConfigError, match="unknown flag --num-layers"):
        read_settings(parser, ["--num-layers", "8"], [ParallelConfig])


def test_a_tool_is_told_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="--num-layers, --hidden-size, --num-attention-heads"):
        read_settings(build_parser([ModelConfig]), [], [ModelConfig])


def test_notes_of_settings_that_do_less_than_one_may_think() -> None:
    assert notes_of("--save x") == ["--save without --save-interval: a checkpoint is written only when the run ends"]
    assert notes_of("--save-interval 5") == ["--save-interval: no effect without --save"]
    assert notes_of("--sequence-parallel") == ["--sequence-parallel: no effect with --tensor-model-parallel-size 1"]
    assert notes_of("--recompute-num-layers 2") == [
        "--recompute-num-layers: no effect without --recompute-granularity full"
    ]
    assert notes_of("--moe-layer-recompute") == ["--recompute-modules moe: no effect without --num-experts"]
    assert notes_of("--recompute-granularity full --recompute-modules mlp") == [
        "--recompute-modules: no effect with --recompute-granularity full, which recomputes whole layers"
    ]
    assert notes_of("--fp32-residual-connection") == [
        "--fp32-residual-connection: no effect with --precision fp32, where nothing is narrower than fp32"
    ]
    assert notes_of("--bf16 --fp32-residual-connection --attention-softmax-in-fp32") == []
    assert notes_of("--num-query-groups 2") == ["--num-query-groups: no effect without --group-query-attention"]
    assert notes_of("--expert-tensor-parallel-size 2") == [
        "--expert-tensor-parallel-size: no effect without --num-experts"
    ]
    assert notes_of("--save x --save-interval 5") == []


@pytest.mark.parametrize("flag", ["--mask-prob 0.15", "--bert-no-binary-head", "--bert-layout original"])
def test_flags_of_a_bert_are_refused_by_a_gpt_and_named(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"a flag of pretrain_bert\.py; leave it out for a GPT"):
        parse_run_config([*TINY, *flag.split()])
    config, notes = parse_run_config([*TINY, *flag.split()], model="BERT")
    assert config.bert is not None and notes == parse_run_config(TINY, model="BERT")[1]
    assert parse_run_config(TINY)[0].bert is None
