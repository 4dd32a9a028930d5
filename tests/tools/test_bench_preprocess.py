"""The preprocessing benchmark. Reference: it checks by itself that both sides write the same files."""

import re

from tools.bench_preprocess import main


def test_a_small_round_compares_equal_files(capsys) -> None:
    assert main(["--megabytes", "0.3", "--rounds", "1", "--vocab-size", "400"]) == 0
    printed = capsys.readouterr().out
    for what in ("a plain loop", "the plain way with 2 workers", r"the raw tokenizer's batch speed on \d+ cores"):
        assert re.search(rf"ratio \d+\.\d\dx documents per second with 2 workers (over|of) {what}", printed)
    assert "the files are equal" in printed
