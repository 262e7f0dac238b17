"""Pictures for the documents, made when asked: `EBBTIDE_PICTURES=1 pytest tests/browser`."""

import os
from pathlib import Path

import pytest

from tests.browser.chrome import found
from tests.browser.test_dashboard import DRAWN, give_key, night

PICTURES = Path(__file__).parents[2] / "docs/images"

pytestmark = [
    pytest.mark.skipif("EBBTIDE_PICTURES" not in os.environ, reason="pictures were not asked for"),
    pytest.mark.skipif(found() is None, reason="there is no Chromium here"),
]


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    [("light", 1280, 0, "light"), ("dark", 1280, 1100, "dark"), ("phone", 390, 1500, "light")],
)
async def test_pictures(browser, name, width, height, scheme):
    """Of height 0 is the whole page."""
    async with night(keys=True).open() as url, browser.tab(width, height or 900, prefers_color_scheme=scheme) as tab:
        await tab.open(url)
        await give_key(tab, "key-of-ops")
        await tab.until(DRAWN)
        await tab.until(
            "document.querySelectorAll('.events li').length > 5 && document.querySelector('#clock').textContent"
        )
        if not height:
            await tab.begin(
                width, await tab.run("document.documentElement.scrollHeight"), {"prefers_color_scheme": scheme}
            )
            await tab.until("innerHeight > 2000")
        (PICTURES / f"dashboard-{name}.png").write_bytes(await tab.picture())
