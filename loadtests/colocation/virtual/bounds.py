"""How much there is to win: the fluid bound, and the best timetable in hindsight.

Fluid: chat is water. A node that only chats holds x* requests a second within the objective's time a token; what chat
does not need of the fleet does batch at the rate of a node that only does batch, and moving a node costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.colocation.virtual.profiles import Profile, Slo

BIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one chat is like on average: prompt tokens, their square, answer tokens."""

    prompt: float
    prompt2: float
    output: float


def shape(lengths: Sequence[tuple[int, int]]) -> Shape:
    """Of (prompt, answer) lengths."""
    count = len(lengths)
    return Shape(
        prompt=sum(prompt for prompt, _ in lengths) / count,
        prompt2=sum(prompt * prompt for prompt, _ in lengths) / count,
        output=sum(output for _, output in lengths) / count,
    )


def chat_rate(profile: Profile, slo: Slo, chat: Shape) -> float:
    """x*: the most chats a second that a node holds, each token within the objective, in its sequences and its KV.

    x chats a second leave 1 - x w of the time for decoding (w: reading an average prompt). B sequences decode at once,
    each token takes t = (a + c B + d K) / (1 - x w), and B = x o t (o: tokens of an average answer). Where neither
    sequences nor KV bind, the largest x is that of (1 - x w) / (a + c B + d K) >= 1 / tpot.
    """
    work = profile.b * chat.prompt + profile.e * chat.prompt2 / 2
    tokens = chat.prompt + chat.output / 2
    most = min(profile.seqs, profile.kv_tokens / tokens)

    def holds(rate: float) -> bool:
        left = 1 - rate * work - rate * chat.output * (profile.c + profile.d * tokens)
        if left <= 0:
            return False
        sequences = rate * chat.output * profile.a / left
        return sequences <= most and sequences <= rate * chat.output * slo.tpot

    low, high = 0.0, 1 / work if work else 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def fluid(rates: Sequence[float], chat: Sequence[float], batch: Sequence[float]) -> float:
    """Tokens a second of batch, on average over bins of chat `rates`; `chat` and `batch` are what each node does alone.

    Chat is given first to nodes that lose the least batch by it.
    """
    order = sorted(range(len(chat)), key=lambda node: batch[node] / chat[node])
    total = 0.0
    for rate in rates:
        left = rate
        for node in order:
            used = min(1.0, left / chat[node])
            left -= used * chat[node]
            total += (1 - used) * batch[node]
    return total / len(rates) if rates else 0.0


def binned(times: Sequence[float], start: float, end: float) -> list[float]:
    """Arrivals a second in whole bins of a minute from `start` to `end`."""
    bins = [0] * max(1, round((end - start) / BIN_S))
    for t in times:
        if start <= t < end:
            bins[min(len(bins) - 1, int((t - start) / BIN_S))] += 1
    return [count / BIN_S for count in bins]


def timetable(met: Sequence[Sequence[int]], worth: float, target: int) -> list[int]:
    """For each minute the nodes chat gets. `met[k][minute]` is how many chats keep the objective with `k` nodes.

    The fewest node-minutes with at least `target` chats met, where a node that changes hands loses `worth` of a
    node-minute. A price of a missed chat is searched; for each a dynamic programme over minutes finds the best.
    """
    low, high = 0.0, 64.0
    best = _cheapest(met, high, worth)
    for _ in range(30):
        price = (low + high) / 2
        found = _cheapest(met, price, worth)
        if sum(met[k][minute] for minute, k in enumerate(found)) >= target:
            best, high = found, price
        else:
            low = price
    return best


def _cheapest(met: Sequence[Sequence[int]], price: float, worth: float) -> list[int]:
    nodes, minutes = range(len(met)), range(len(met[0]))
    cost = [0.0 for _ in nodes]
    came: list[list[int]] = []
    for minute in minutes:
        step, origin = [], []
        for k in nodes:
            before = min(nodes, key=lambda one: cost[one] + worth * abs(k - one))
            step.append(cost[before] + worth * abs(k - before) + k - price * met[k][minute])
            origin.append(before)
        cost = step
        came.append(origin)
    k = min(nodes, key=lambda one: cost[one])
    ks = []
    for origin in reversed(came):
        ks.append(k)
        k = origin[k]
    return ks[::-1]
