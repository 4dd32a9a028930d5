"""Reference: the rules stated in observe/log.py, on streams in memory."""

import io

from megatron_parm.observe.log import Log


def logs(rank, speaking_rank=0):
    out, err = io.StringIO(), io.StringIO()
    return Log(rank, speaking_rank, out=out, err=err), out, err


def test_only_the_speaking_rank_speaks():
    for rank, expected in ((0, ""), (3, "hello\n")):
        log, out, err = logs(rank, speaking_rank=3)
        log.say("hello")
        log.warn_once("k", "careful")
        assert out.getvalue() == expected
        assert err.getvalue() == ("warning: careful\n" if expected else "")


def test_a_warning_is_said_once_per_key_and_per_log():
    log, _, err = logs(0)
    for key in ("a", "a", "b", "a"):
        log.warn_once(key, key.upper())
    assert err.getvalue() == "warning: A\nwarning: B\n"
    other, _, other_err = logs(0)
    other.warn_once("a", "A")
    assert other_err.getvalue() == "warning: A\n"  # no memory shared between two logs


def test_any_rank_can_say_what_it_alone_knows():
    log, out, err = logs(2)
    log.say_from_this_rank("gradient is NaN")
    assert (out.getvalue(), err.getvalue()) == ("", "[rank 2] gradient is NaN\n")


def test_standard_streams_are_those_of_the_time_of_speaking(capsys):
    log = Log(0)
    log.say("to out")
    log.warn("to err")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("to out\n", "warning: to err\n")
