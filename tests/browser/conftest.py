"""A headless browser for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.browser.chrome import Browser, found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = found()
    assert program is not None
    browser = Browser(program)
    yield browser
    browser.close()
