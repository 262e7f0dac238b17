"""What an operator may say of the care of nodes, and what is refused."""

import pytest
import yaml

from router import assembly
from router.errors import SettingsError
from router.fleet.hooks import Command, Http
from router.settings import load
from router.upstream.client import Client

NODE = {"name": "a", "url": "http://127.0.0.1:1"}


def loaded(tmp_path, **recycle):
    path = tmp_path / "ebbtide.yaml"
    path.write_text(yaml.safe_dump({"nodes": [NODE], "care": {"recycle": recycle}}))
    return load(path, {})


@pytest.mark.parametrize(
    ("recycle", "words"),
    [
        ({"enabled": True}, "needs a hook"),
        ({"command": ["x"], "http": {"url": "http://h"}}, "one of them"),
        ({"command": [""]}, "care.recycle.command"),
        ({"http": {"url": "http://u:p@h"}}, "user name or password"),
        ({"rss_limit_bytes": 10}, "care.recycle.rss_limit_bytes"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, recycle, words):
    with pytest.raises(SettingsError, match=words):
        loaded(tmp_path, **recycle)


async def test_the_hook_is_what_was_written(tmp_path):
    async with Client() as client:
        assert assembly.hook(loaded(tmp_path), client) is None
        assert isinstance(assembly.hook(loaded(tmp_path, command=["/bin/true"]), client), Command)
        assert isinstance(assembly.hook(loaded(tmp_path, http={"url": "https://h/{node}"}), client), Http)


def test_a_dry_run_is_the_default(tmp_path):
    assert not assembly.care(loaded(tmp_path, command=["/bin/true"])).enabled
