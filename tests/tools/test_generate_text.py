"""The sampling tool. Reference: the model of the checkpoint, and one process for other layouts."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_parm.config.bert import BertConfig
from megatron_parm.errors import ConfigError, MegatronParmError
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training import inference
from megatron_parm.training.generate import SamplingRules
from tests.config.commands import config_of
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, flags, run_training, write_corpus
from tools import generate_text

LINE = "-" * 40


@pytest.fixture(scope="module")
def trained(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two iterations, and one of four."""
    root = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(root / "numbers")
    argv = flags(corpus, MOE, "--save-interval 2", "--save", str(root / "run"))
    (outcome,) = pools.run(Layout(1), run_training, argv)
    assert outcome.error is None
    return root / "run"


def test_prompts_are_continued_in_the_tokenizers_own_words(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt and its continuation are decoded together: numbers stay apart, as pieces of words join."""
    argv = f"--load {trained} --num-samples 2 --max-new-tokens 5 --seed 3".split()
    assert generate_text.main([*argv, "--prompt", "3 4", "--prompt", "17"]) == 0
    samples = capsys.readouterr().out.split(f"\n{LINE}\n")
    assert samples.pop() == "" and len(samples) == 4
    for sample, prompt in zip(samples, ([3, 4], [3, 4], [17], [17]), strict=True):
        ids = [int(word) for word in sample.split()]
        assert ids[: len(prompt)] == prompt and len(ids) <= len(prompt) + 5 and max(ids) < 30
    assert generate_text.main([*argv, "--prompt", "3 4", "--prompt", "17"]) == 0
    assert capsys.readouterr().out.split(f"\n{LINE}\n")[:-1] == samples


def test_without_a_prompt_it_starts_a_document(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_text.main(["--load", str(trained), "--max-new-tokens", "3", "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()[0].split()) <= 3


def test_an_earlier_checkpoint_is_another_model(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--load", str(trained), "--max-new-tokens", "40", "--prompt", "1"]
    texts = []
    for step in ("2", "4"):
        assert generate_text.main([*argv, "--ckpt-step", step]) == 0
        texts.append(capsys.readouterr().out)
    assert generate_text.main(argv) == 0
    assert texts[0] != texts[1] == capsys.readouterr().out


def _sample(ctx: ParallelContext, argv: list[str]) -> str:
    said = io.StringIO()
    flags = generate_text.parse(argv)
    try:
        with redirect_stdout(said):
            generate_text.sample(flags, SamplingRules(8), ctx)
    except MegatronParmError as error:
        return f"{error.exit_code}: {error}"
    return said.getvalue()


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(4, tp=2, ep=2), Layout(4, ep=2, esp=2)], ids=str)
def test_another_layout_says_the_same_from_its_first_rank(pools: Pools, trained: Path, layout: Layout) -> None:
    """The checkpoint of one process has 31 rows of vocabulary, which tp 2 cannot cut."""
    argv = ["--load", str(trained), "--prompt", "5 6"]
    (alone,) = pools.run(Layout(1), _sample, argv)
    sizes = {
        "tensor-model-parallel": layout.tp,
        "expert-model-parallel": layout.ep,
        "expert-tensor-parallel": layout.esp,
    }
    argv += [word for name, size in sizes.items() for word in (f"--{name}-size", str(size))]
    assert pools.run(layout, _sample, argv) == [alone] + [""] * (layout.world - 1)


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        ("--load /no/such", 2, ("--load /no/such", "--save")),
        ("--load {root} --ckpt-step 3", 21, ("--ckpt-step 3", "iter_0000004, iter_0000002")),
        ("--load {root} --temperature -1", 2, ("--temperature -1",)),
        ("--load {root} --num-samples 0", 2, ("--num-samples 0",)),
        ("--load {root} --prompt word", 2, ("'word'", "NullTokenizer")),
        ("--load {root} --tensor-model-parallel-size 2", 2, ("2", "1")),
    ],
)
def test_what_cannot_work_is_a_message(
    trained: Path, capsys: pytest.CaptureFixture[str], argv: str, code: int, told: tuple[str, ...]
) -> None:
    assert generate_text.main(argv.format(root=trained).split()) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and len(captured.err.splitlines()) < 6
    for part in told:
        assert part in captured.err


def test_sizes_that_do_not_fit_the_model_are_named_on_all_ranks(pools: Pools, trained: Path) -> None:
    argv = ["--load", str(trained), "--expert-model-parallel-size", "8", "--tensor-model-parallel-size", "8"]
    for said in pools.run(Layout(8, tp=8, ep=8), _sample, argv):
        assert said.startswith("2: ") and "--expert-model-parallel-size 8" in said


def test_a_wrong_flag_is_argparses_own_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate_text.main(["--prompt", "1"])
    assert caught.value.code == 2 and "--load" in capsys.readouterr().err


def test_another_vocabulary_is_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state names a vocabulary that its tokenizer no longer has."""
    state = json.loads((trained / "iter_0000004" / "state.json").read_text())
    assert state["vocab_size"] == 31
    with pytest.raises(MegatronParmError, match="31 tokens there, 40 tokens here"):
        inference.check_vocabulary(40, "NullTokenizer", state)


def test_sampling_holds_whole_sequences() -> None:
    """A text grows by one token at a time, so it cannot be cut over tp; the weights are the same."""
    config = config_of("--tensor-model-parallel-size 2 --sequence-parallel")
    given = generate_text.parse(["--load", "x", "--tensor-model-parallel-size", "2"])
    assert config.parallel.sequence_parallel
    assert not inference.for_inference(config, given, 2).parallel.sequence_parallel


def test_a_bert_writes_no_text() -> None:
    config = replace(config_of(), bert=BertConfig())
    flags = generate_text.parse(["--load", "runs/bert"])
    with pytest.raises(ConfigError, match=r"--load runs/bert: this is a BERT"):
        inference.for_inference(config, flags, 1)
