"""The benchmark of a GPT's indices runs and says what it measured."""

import re

import pytest

from tools.bench_token_index import main


def test_it_prints_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--documents", "2000", "--longest", "9", "--seq-length", "16", "--epochs", "2.5"]) == 0
    found = re.match(
        r"2000 documents, (\d+) tokens, (\d) epochs: (\d+) samples in ([\d.]+) s of CPU; (\d+) MiB of memory at most, "
        r"(\d+) MiB with the process and the lengths",
        capsys.readouterr().out,
    )
    assert found is not None
    assert 9000 < int(found[1]) < 11000 and found[2] == "3" and int(found[3]) == (3 * int(found[1]) - 1) // 16
    assert int(found[5]) < int(found[6]) < 100_000


@pytest.mark.parametrize("flag", ["--documents", "--longest", "--seq-length", "--epochs"])
def test_a_size_of_nothing_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag, "0"]) == 2
    assert f"error: {flag} 0" in capsys.readouterr().err
