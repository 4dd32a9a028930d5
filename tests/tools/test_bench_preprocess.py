"""The preprocessing benchmark. Reference: it checks by itself that both sides write the same files."""

import re

from tools.bench_preprocess import main


def test_a_small_round_compares_equal_files(capsys) -> None:
    assert main(["--megabytes", "0.3", "--rounds", "1", "--vocab-size", "400"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"ratio \d+\.\d\dx documents per second with 2 workers .* the files are equal", printed)
