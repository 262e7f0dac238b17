"""The constants of a profile from a handful of single requests to a real engine.

decode      the gap between tokens: alone (a + c + d ctx), of four at once (c), after a long prompt (d)
reading     the first token of a prompt sent again, which is in the cache: short and long (ingest, by token)
prefill     the first token of prompts of many lengths, never seen before (b, e), by least squares
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from loadtests.colocation.virtual.probe import RealEngine
from loadtests.colocation.virtual.profiles import Profile

LENGTHS = (64, 200, 512, 1024, 2048, 4096, 8192, 12000, 16000, 20000)
SHORT, LONG = 200, 20000


async def measure(engine: RealEngine, chunk: int, seqs: int, repeats: int) -> Profile:
    """A profile of that engine, which does nothing else meanwhile and was started with those two limits."""
    context, kv_tokens = await engine.facts()
    await engine.complete(engine.prompt(SHORT), 8)
    alone = await _gap(engine, SHORT, 1, repeats)
    four = await _gap(engine, SHORT, 4, repeats)
    late = await _gap(engine, LONG, 1, 1)
    c = max(0.0, (four - alone) / 3)
    d = max(0.0, (late - alone) / (LONG - SHORT))
    a = alone - c - d * SHORT
    cached = {length: await _cached(engine, length, repeats) for length in (SHORT, LONG)}
    ingest_token = max(0.0, (cached[LONG] - cached[SHORT]) / (LONG - SHORT))
    ingest = max(0.0, cached[SHORT] - a - ingest_token * SHORT)
    seen = [(length, await _first(engine, length, repeats)) for length in LENGTHS if length < context]
    b, e = solve([(n, ttft - ingest - ingest_token * n - a * -(-n // chunk)) for n, ttft in seen])
    plain = Profile(name="fitted", a=a, b=b, c=c, d=d, e=e, kv_tokens=kv_tokens, seqs=seqs, chunk=chunk)
    return replace(plain, context=context, ingest_s=ingest, ingest_token_s=ingest_token, token_s=0.0)


def solve(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """b and e of b n + e n^2 / 2 through (n, seconds), every point weighted by its relative error; neither negative."""
    rows = [(n / t, n * n / 2 / t) for n, t in points if t > 0]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x1, y1 = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = xx * yy - xy * xy
    b, e = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    if e < 0:
        return x1 / xx, 0.0
    return (b, e) if b >= 0 else (0.0, y1 / yy)


async def _gap(engine: RealEngine, prompt: int, many: int, repeats: int) -> float:
    """Median seconds between tokens when `many` decode at once."""
    gaps = []
    for _ in range(repeats):
        streams = await asyncio.gather(*(engine.complete(engine.prompt(prompt), 64) for _ in range(many)))
        gaps += [gap for stream in streams for gap in stream.gaps[8:]]
    return median(gaps)


async def _first(engine: RealEngine, prompt: int, repeats: int) -> float:
    """Least seconds to the first token of a prompt never seen before."""
    return min([(await engine.complete(engine.prompt(prompt), 1)).ttft for _ in range(repeats)])


async def _cached(engine: RealEngine, prompt: int, repeats: int) -> float:
    """Least seconds to the first token of a prompt sent again."""
    words = engine.prompt(prompt)
    await engine.complete(words, 1)
    return min([(await engine.complete(words, 1)).ttft for _ in range(repeats)])
