"""Logging is one for the process: what a test changes in it is put back."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from router import logs


@contextmanager
def logging_restored() -> Iterator[None]:
    """A block after which logging is as it was."""
    names = ("", "ebbtide", *logs.FOREIGN)
    before = {name: (logging.getLogger(name).level, list(logging.getLogger(name).handlers)) for name in names}
    try:
        yield
    finally:
        logs.configure(calls=False)
        for name, (level, handlers) in before.items():
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).handlers = handlers
        logging.captureWarnings(False)
        structlog.reset_defaults()
