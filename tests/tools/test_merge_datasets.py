"""The merge tool from its command line. Reference: Megatron's flags; the file of all documents."""

import pytest

from megatron_parm.data.indexed_dataset import IndexedDataset
from tests.data.corpora import write_documents
from tests.data.test_merge import bytes_of, write
from tools.merge_datasets import main


def test_a_folder_and_a_list_give_the_same_file(tmp_path, capsys) -> None:
    (tmp_path / "parts").mkdir()
    first = write_documents(tmp_path / "parts" / "a", [[1, 2], [3]])
    second = write_documents(tmp_path / "parts" / "b", [[4]])
    whole = write_documents(tmp_path / "whole", [[1, 2], [3], [4]])
    assert main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "out" / "folder")]) == 0
    assert "2 files, 3 documents, 3 sequences, 4 tokens" in capsys.readouterr().out
    assert main(["--input", first, f"{second}.idx", "--output-prefix", str(tmp_path / "list")]) == 0
    assert bytes_of(tmp_path / "out" / "folder") == bytes_of(tmp_path / "list") == bytes_of(whole)


def test_a_file_that_exists_is_kept(tmp_path, capsys) -> None:
    part, other = write_documents(tmp_path / "a", [[1]]), write_documents(tmp_path / "b", [[2]])
    flags = ["--input", part, "--output-prefix", other]
    assert main(flags) == 2
    assert "exists; name another one, or give --overwrite" in capsys.readouterr().err
    assert IndexedDataset(other).read(0).tolist() == [2]
    assert main([*flags, "--overwrite"]) == 0
    assert IndexedDataset(other).read(0).tolist() == [1]


def test_modes_left_out_are_told(tmp_path, capsys) -> None:
    part = write(tmp_path / "a", [[[1], [2]]], modes=1)
    assert main(["--input", part, "--output-prefix", str(tmp_path / "text")]) == 0
    assert "the modes of" in capsys.readouterr().err
    assert main(["--input", part, "--output-prefix", str(tmp_path / "modes"), "--multimodal"]) == 0
    assert capsys.readouterr().err == ""
    assert bytes_of(tmp_path / "modes") == bytes_of(part)


@pytest.mark.parametrize("name", ["nowhere", "damaged"])
def test_a_problem_is_one_line(tmp_path, capsys, name) -> None:
    write_documents(tmp_path / "damaged", [[1]])
    (tmp_path / "damaged.idx").write_bytes(b"MMIDIDX\0\0")
    assert main(["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and name in error
