"""Calls across threads are answered, or fail with the name of who did not answer."""

from __future__ import annotations

import threading

import pytest

from mindspeed_asyncflow.engines.calls import CallQueue
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError


def serve(calls: CallQueue, stop: threading.Event) -> threading.Thread:
    def loop() -> None:
        while not stop.is_set():
            calls.wait(1.0)
            calls.run_all()
        calls.end("it is closed")

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def test_calls_run_in_the_owning_thread_in_order_and_errors_come_back() -> None:
    calls, stop = CallQueue("engine"), threading.Event()
    thread = serve(calls, stop)
    try:
        assert calls.call("where", threading.get_ident, 5.0) == thread.ident
        seen: list[int] = []
        for value in range(20):
            calls.post(lambda value=value: seen.append(value))
        with pytest.raises(ZeroDivisionError):
            calls.call("divide", lambda: 1 / 0, 5.0)
        assert seen == list(range(20))
        with pytest.raises(TimeoutError, match="inner"):  # the action's own timeout is not the call's deadline
            calls.call("nested", lambda: (_ for _ in ()).throw(TimeoutError("inner")), 5.0)
    finally:
        stop.set()
        calls.nudge()
        thread.join(5.0)
    with pytest.raises(EngineError, match="engine: it is closed"):
        calls.call("late", lambda: None, 5.0)


def test_a_call_that_nobody_answers_ends_at_its_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"engine: update got no answer in 0.05 s"):
        CallQueue("engine").call("update", lambda: None, 0.05)


def test_calls_that_wait_at_the_end_fail_with_the_reason() -> None:
    calls = CallQueue("engine")
    ran: list[int] = []
    errors: list[Exception] = []

    def caller() -> None:
        try:
            calls.call("update", lambda: ran.append(1), 5.0)
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=caller)
    thread.start()
    calls.wait(5.0)
    calls.end("it broke: OSError()")
    thread.join(5.0)
    assert ran == [] and "update was not answered: it broke: OSError()" in str(errors[0])
