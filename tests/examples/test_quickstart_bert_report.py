"""The report of BERT's quickstart. Reference: logs written here."""

import json
from pathlib import Path

import pytest

from examples.quickstart_bert_report import main


def _log(path: Path, losses: list[float], **more: float) -> str:
    events = [
        {"event": "valid", "iteration": 50 * place, "split": "valid", "lm_loss": loss, **more}
        for place, loss in enumerate(losses)
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(path)


@pytest.mark.parametrize(("last", "code"), [(6.5, 0), (6.7, 1)])
def test_the_exit_code_follows_the_fall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: float, code: int
) -> None:
    log = _log(tmp_path / "run.jsonl", [7.6, 9.0, last], sop_loss=0.69)
    assert main(["--log", log]) == code
    said = capsys.readouterr().out
    assert f"{7.6 - last:.3f} nats less" in said and "order of two segments: 0.690" in said


def test_a_log_without_two_validations_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--log", _log(tmp_path / "run.jsonl", [7.6])]) == 1
    assert "no two validations" in capsys.readouterr().out


def test_a_missing_log_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--log", str(tmp_path / "none.jsonl")]) == 2
    assert "error: cannot read the run log" in capsys.readouterr().err
