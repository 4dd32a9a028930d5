"""Reference: a stream that says it is a terminal, and one that says it is not."""

import io

from megatron_parm.observe.log import Log
from megatron_parm.observe.progress import Progress, write_above_bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with Progress(total=10, done=4, stream=stream) as progress:
        progress.advance(6, loss=2.5)
    assert "4/10" in stream.getvalue() and "40%" in stream.getvalue()


def test_a_file_or_another_rank_gets_nothing():
    for stream, is_shown in ((io.StringIO(), True), (Terminal(), False)):
        with Progress(total=10, is_shown=is_shown, stream=stream) as progress:
            progress.advance(10, loss=2.5)
        assert stream.getvalue() == ""


def test_log_lines_go_above_the_bar_whole():
    stream = Terminal()
    log = Log(0, write=write_above_bars, out=stream)
    with Progress(total=10, stream=stream):
        log.say("iteration 1")
    assert "\riteration 1\n" in stream.getvalue()  # the bar is wiped first, the line has a row of its own
