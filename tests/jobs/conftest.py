"""A bench for the sender of webhooks, at a fresh store."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.jobs.hooks import Bench
from tests.store.conftest import in_a_thread


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database to copy."""
    file = tmp_path_factory.mktemp("migrated") / "hooks.db"
    in_a_thread(f"sqlite:///{file}")
    return file


@pytest.fixture
async def bench(tmp_path: Path, migrated: Path) -> AsyncIterator[Bench]:
    shutil.copy(migrated, tmp_path / "hooks.db")
    async with Bench(tmp_path) as bench:
        yield bench
