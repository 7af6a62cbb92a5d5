"""The connector's messages are in the engine's log, at the engine's level."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvatlas.engines.vllm.engine_log import CONNECTOR, join_engine_log

NAMES = ("", "vllm", "kvatlas", CONNECTOR, "kvatlas.wire")


@contextmanager
def engine_log() -> Iterator[io.StringIO]:
    """Loggers as `vllm serve` has them: one handler, at the logger `vllm`."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(one.handlers, one.level, one.propagate) for one in loggers]
    written = io.StringIO()
    for one in loggers:
        one.handlers, one.propagate = [], True
        one.setLevel(logging.NOTSET)
    loggers[0].setLevel(logging.WARNING)
    loggers[1].handlers = [logging.StreamHandler(written)]
    loggers[1].propagate = False
    loggers[1].setLevel(logging.INFO)
    try:
        yield written
    finally:
        for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)


def write() -> None:
    logging.getLogger(CONNECTOR).info("transport shm")
    logging.getLogger(CONNECTOR).debug("a detail")
    logging.getLogger("kvatlas.wire").info("connected")
    logging.getLogger("kvatlas.wire").warning("rejected")


def test_messages_of_the_connector_are_in_the_log_of_the_engine() -> None:
    with engine_log() as written:
        join_engine_log()
        join_engine_log()  # several ranks of one process
        write()
    assert written.getvalue() == "transport shm\nrejected\n"


def test_warnings_are_in_the_log_of_a_quiet_engine() -> None:
    with engine_log() as written:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        join_engine_log()
        write()
        logging.getLogger(CONNECTOR).warning("read failed")
    assert written.getvalue() == "rejected\nread failed\n"


def test_an_application_that_handles_messages_goes_on_doing_so() -> None:
    own = io.StringIO()
    with engine_log() as written:
        logging.getLogger("kvatlas").addHandler(logging.StreamHandler(own))
        join_engine_log()
        write()
    assert (written.getvalue(), own.getvalue()) == ("", "rejected\n")
