"""Spans of a rank. Reference: a clock that the test sets."""

from megatron_parm.observe.trace import COMPUTE, NO_TRACE, Recording, Span


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 10
        return self.now


def test_spans_are_kept_between_start_and_stop() -> None:
    trace = Recording(Clock())
    with trace.span("before"):
        pass
    trace.start()
    with trace.span("forward", micro_batch=3), trace.span("layer"):
        trace.add("ep", "all_to_all", "collective", 1, 2, bytes=64)
    trace.stop()
    with trace.span("after"):
        pass
    trace.add("ep", "all_to_all", "collective", 3, 4)
    assert trace.spans == [
        Span("ep", "all_to_all", "collective", 1, 2, {"bytes": 64}),
        Span(COMPUTE, "layer", "compute", 20, 30),
        Span(COMPUTE, "forward", "compute", 10, 40, {"micro_batch": 3}),
    ]


def test_a_span_ends_when_its_block_raises() -> None:
    trace = Recording(Clock())
    trace.start()
    try:
        with trace.span("forward"):
            raise ValueError
    except ValueError:
        pass
    assert [span.name for span in trace.spans] == ["forward"]


def test_the_null_trace_keeps_nothing() -> None:
    with NO_TRACE.span("forward", micro_batch=0):
        NO_TRACE.add("ep", "all_to_all", "collective", 1, 2)
    assert not NO_TRACE.is_recording and not vars(NO_TRACE)
