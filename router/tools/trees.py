"""The memory of an engine's whole process tree, read from the system.

Rules: processes come and go while they are read: one that vanishes, or may not be looked at, counts as nothing and
ends nothing. What cannot be known is None. Every reading is bounded: at most `MOST` processes, `TEXT` characters of a
command line; proportional memory (which costs the kernel a walk over every page) at most once in `PSS_EVERY_S`, and
not again for long once it took more than `PSS_WITHIN_S`.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

MOST = 4096
TEXT = 8192
PSS_EVERY_S = 60.0
PSS_WITHIN_S = 0.25
PSS_REST_S = 3600.0
NO_LIMIT = 2**60
"""cgroup v1 writes a huge number where there is no limit."""
GONE = (psutil.Error, OSError)

Key = tuple[int, float]
"""A process: its id and when it was made, since ids are used again."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a tree at one time. Bytes; `started_at` in seconds since 1970; None is unknown.

    `limit_bytes` is the least of the cgroup's limits and the machine's memory. `gpu_bytes` is memory in use by device;
    `tree_gpu_bytes` what NVML says the tree itself holds.
    """

    processes: int = 0
    rss_bytes: float | None = None
    pss_bytes: float | None = None
    started_at: float | None = None
    restarts: int = 0
    cgroup_bytes: float | None = None
    cgroup_anon_bytes: float | None = None
    limit_bytes: float | None = None
    gpu_bytes: Mapping[str, float] = {}
    tree_gpu_bytes: float | None = None


class Chosen:
    """Which processes are roots: one by its id, or those whose command line matches and whose parent's does not.

    This process and those it came from never match: the pattern stands in their own command lines.
    """

    def __init__(self, *, pid: int | None = None, match: re.Pattern[str] | None = None) -> None:
        self._pid = pid
        self._match = match
        self._known: dict[Key, bool] = {}

    def roots(self, table: Mapping[int, psutil.Process]) -> list[int]:
        """Root processes of a table of all."""
        if self._match is None:
            return [self._pid] if self._pid is not None and self._pid in table else []
        own = set(_ancestors(os.getpid(), table))
        known = {pid: key for pid, process in table.items() if pid not in own and (key := _key(process)) is not None}
        self._known = {key: self._matches(table[pid], key) for pid, key in known.items()}
        return [pid for pid, key in known.items() if self._known[key] and not self._under(pid, table, known)]

    def _matches(self, process: psutil.Process, key: Key) -> bool:
        if key in self._known:
            return self._known[key]
        assert self._match is not None
        with suppress(*GONE):
            return self._match.search(" ".join(process.cmdline())[:TEXT]) is not None
        return False

    def _under(self, pid: int, table: Mapping[int, psutil.Process], known: Mapping[int, Key]) -> bool:
        above = list(_ancestors(pid, table))[1:]
        return any(one in known and self._known[known[one]] for one in above)


class Tree:
    """One engine's processes. `read` is called again and again; it blocks, so not on an event loop."""

    def __init__(
        self,
        chosen: Chosen,
        *,
        gpus: "Gpus | None" = None,
        cgroups: "Cgroups | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chosen = chosen
        self._gpus = gpus
        self._cgroups = cgroups or Cgroups()
        self._clock = clock
        self._began: Key | None = None
        self._restarts = 0
        self._pss: float | None = None
        self._pss_at = -float("inf")

    def read(self) -> Reading:
        """What there is now."""
        table = {process.pid: process for process in psutil.process_iter()}
        roots = self._chosen.roots(table)
        tree = _below(roots, table)
        sizes = [size for process in tree if (size := _rss(process)) is not None]
        if not sizes:
            return Reading(restarts=self._restarts)
        self._notice([key for pid in roots if (key := _key(table[pid])) is not None])
        cgroup, anon, limit = self._cgroups.read(roots[0])
        total = float(psutil.virtual_memory().total)
        pids = {process.pid for process in tree}
        gpu, held = self._gpus.read(pids) if self._gpus is not None else ({}, None)
        return Reading(
            processes=len(sizes),
            rss_bytes=float(sum(sizes)),
            pss_bytes=self._proportional(tree),
            started_at=self._began[1] if self._began else None,
            restarts=self._restarts,
            cgroup_bytes=cgroup,
            cgroup_anon_bytes=anon,
            limit_bytes=total if limit is None else min(total, limit),
            gpu_bytes=gpu,
            tree_gpu_bytes=held,
        )

    def _notice(self, keys: Sequence[Key]) -> None:
        """A restart: the root that was oldest is gone, and there is another."""
        if not keys or self._began in keys:
            return
        if self._began is not None:
            self._restarts += 1
        self._began = min(keys, key=lambda key: key[1])

    def _proportional(self, tree: Sequence[psutil.Process]) -> float | None:
        began = self._clock()
        if began - self._pss_at < PSS_EVERY_S:
            return self._pss
        self._pss_at, total = began, 0.0
        for process in tree:
            try:
                total += process.memory_full_info().pss
            except (*GONE, AttributeError):
                self._pss = None
                return None
            if self._clock() - began > PSS_WITHIN_S:
                self._pss, self._pss_at = None, began + PSS_REST_S
                return None
        self._pss = total
        return total


def _key(process: psutil.Process) -> Key | None:
    with suppress(*GONE):
        return process.pid, process.create_time()
    return None


def _rss(process: psutil.Process) -> int | None:
    with suppress(*GONE):
        return int(process.memory_info().rss)
    return None


def _ancestors(pid: int, table: Mapping[int, psutil.Process]) -> Iterator[int]:
    """A process, its parent, and so on."""
    seen: set[int] = set()
    while pid in table and pid not in seen:
        yield pid
        seen.add(pid)
        try:
            pid = table[pid].ppid()
        except GONE:
            return


def _below(roots: Iterable[int], table: Mapping[int, psutil.Process]) -> list[psutil.Process]:
    """Roots and all that came from them."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        with suppress(*GONE):
            children.setdefault(process.ppid(), []).append(pid)
    waiting, found = list(roots), dict[int, psutil.Process]()
    while waiting and len(found) < MOST:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = table[pid]
            waiting += children.get(pid, ())
    return list(found.values())


class Cgroups:
    """Memory of a process's control group, of version 2 or 1, and the least limit up to the root."""

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._root = root

    def read(self, pid: int) -> tuple[float | None, float | None, float | None]:
        """Bytes in use, anonymous bytes, and the limit; None where the system does not say."""
        for line in _text(self._proc / str(pid) / "cgroup").splitlines():
            _, _, rest = line.partition(":")
            kinds, _, path = rest.partition(":")
            if not kinds:
                home, names = self._root, ("memory.current", "memory.max")
            elif "memory" in kinds.split(","):
                home, names = self._root / "memory", ("memory.usage_in_bytes", "memory.limit_in_bytes")
            else:
                continue
            groups = [group for group in _up(home, path) if (group / names[0]).is_file()]
            if groups:
                limits = [limit for group in groups if (limit := _bytes(group / names[1])) is not None]
                return _bytes(groups[0] / names[0]), _anon(groups[0]), min(limits, default=None)
        return None, None, None


def _up(home: Path, path: str) -> Iterator[Path]:
    """A group and those above it. Inside a container the path may be one only the host sees: then its root is left."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for length in range(len(parts), -1, -1):
        yield home.joinpath(*parts[:length])


def _anon(group: Path) -> float | None:
    words = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    value = words.get("anon") or words.get("total_rss") or ""
    return float(value) if value.isdigit() else None


def _bytes(path: Path) -> float | None:
    text = _text(path).strip()
    return float(text) if text.isdigit() and int(text) < NO_LIMIT else None


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


class Gpus:
    """GPU memory through NVML. `open` gives None when there is no library or no driver that answers."""

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401 - a module without types, or one that stands in for it
        self._nvml = nvml

    @classmethod
    def open(cls) -> "Gpus | None":
        """GPUs, if NVML answers."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return cls(pynvml)

    def read(self, pids: set[int]) -> tuple[dict[str, float], float | None]:
        """Bytes in use by device, and those of these processes (None when NVML knows none of them)."""
        nvml, used, held = self._nvml, dict[str, float](), list[float]()
        with suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                used[str(index)] = float(nvml.nvmlDeviceGetMemoryInfo(device).used)
                with suppress(nvml.NVMLError):
                    running = nvml.nvmlDeviceGetComputeRunningProcesses(device)
                    held += [float(one.usedGpuMemory) for one in running if one.pid in pids and one.usedGpuMemory]
        return used, sum(held) if held else None
