"""The benchmark of checkpoints runs, tells every ratio and leaves nothing. What it measures is of the machine."""

import re
from pathlib import Path

import pytest

from tests.training.processes import ranks
from tools.bench_checkpoint import main


@pytest.mark.timeout(120)
def test_it_tells_every_ratio_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    argv = ["--megabytes", "4", "--tensors", "4", "--rounds", "2", "--folder", str(folder)]
    with ranks(2, argv, tmp_path / "logs", main=main) as running:
        assert running.wait() == [0, 0], running.outputs
    said = running.output(0)
    assert len(re.findall(r"ratio \d+\.\d\d", said)) == 3
    assert re.search(r"stands still \d+\.\d+ s, \d+% of a save", said)
    assert re.search(r"at most -?\d+\.\d\d of a rank's own share", said)
    assert not folder.exists() and running.output(1) == ""
