"""Signals as wishes."""

import os
import signal
import threading
from contextlib import suppress

import pytest

from divebatch.lab import StopRequest

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers_stay():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_nothing_else_happens(number):
    with StopRequest() as stop:
        assert not stop.is_set
        send(number)
        assert stop.is_set


def test_a_second_ctrl_c_interrupts_at_once():
    with StopRequest() as stop:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.is_set


def test_a_second_sigterm_is_as_patient_as_the_first():
    with StopRequest() as stop:
        for _ in range(3):
            send(signal.SIGTERM)
        send(signal.SIGINT)  # the first of its kind
        assert stop.is_set


def test_handlers_are_put_back_after_an_error():
    mine = []
    before = signal.signal(signal.SIGTERM, lambda *_: mine.append(1))
    try:
        with suppress(ZeroDivisionError), StopRequest():
            send(signal.SIGTERM)
            raise ZeroDivisionError
        assert not mine
        send(signal.SIGTERM)
        assert mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_from_outside_python_does_not_break_the_end(monkeypatch):
    real = signal.signal

    def foreign(number, handler):
        real(number, handler)  # and None is what Python says of a handler it did not set

    kept = {number: signal.getsignal(number) for number in SIGNALS}
    with monkeypatch.context() as outside:
        outside.setattr(signal, "signal", foreign)
        with StopRequest():
            pass
    assert all(signal.getsignal(number) == signal.SIG_DFL for number in SIGNALS)
    for number, handler in kept.items():
        real(number, handler)


def test_another_thread_listens_to_nothing_and_can_still_be_asked():
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(stop.is_set)
            stop.is_set = True
            seen.append(stop.is_set)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True]
