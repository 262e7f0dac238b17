"""How fast one node is and how often chat comes to it, learnt from the calls that ran there.

Nothing here is set by hand: every figure is None until calls have shown it. A *quiet* first token is one whose prompt
nothing else was read beside.

    seconds a prompt token    of quiet first tokens, by length class (a class is a power of two): mean and slowest
    unloaded                  the median quiet first token of an interactive call
    residue                   what an interactive call that took batch back waited longer than that: the engine's step
    answers                   their tokens, of interactive calls, the lower quartile
    gap                       between two tokens of one interactive call, the lower quartile of calls
    kept                      the share of a taken-back prompt that needs not be read again
    arrivals                  the mean time between interactive calls
"""

import math

from router.core.recent import Recent

__all__ = ["Pace", "Past"]

OFTEN = 8
"""Prompts of a length before the slowest of them is believed to be about the slowest there is."""
ENOUGH = 3
"""Samples before a quantile is believed."""
OBJECTIVE = 2.0
"""`auto`: the objective for the first token is this multiple of the unloaded one, p95 for p95."""
GAP = 3.0
"""Batch may stretch the time between two tokens of a chat to so many times the usual."""
WEIGHT = 0.2
"""Of a new sample in a running mean."""
ARRIVALS_WEIGHT = 0.1
HOPELESS = 1.5
"""A prompt read for so many times what it takes, in parts, is not being kept."""
KEPT = 0.5
"""That so much of a prompt was kept is believed at once. That less was is believed of lengths that are well known."""
UNTOLD_LOSS = 1.5
"""What a take-back is held to cost, in prompts, at an engine of which nobody knows that it keeps anything: the second
take-back of a call is its last."""
LONG_AGO = -1e9


class Past:
    """What a call that was taken back has behind it.

    `node` read its prompt last, in all for `spent_s` seconds of which `read_s` are believed to be kept there; `times`
    counts take-backs, the last at `taken_at`, and `losses` how much of the prompt was read for nothing, in prompts.
    `urgent` says that the call's window is about to close.
    """

    __slots__ = ("losses", "node", "read_s", "spent_s", "taken_at", "times", "urgent")

    def __init__(self, node: str | None = None) -> None:
        self.node = node
        self.taken_at = LONG_AGO
        self.read_s = self.spent_s = 0.0
        self.times = 0
        self.losses = 0.0
        self.urgent = False

    def moves(self, node: str, whole_s: float | None) -> None:
        """Its prompt is read at `node` now: what another node read of it, of `whole_s` in all, was for nothing."""
        if self.node not in (None, node) and self.read_s > 0.0:
            self.losses += min(1.0, self.read_s / whole_s) if whole_s else 1.0
            self.read_s = self.spent_s = 0.0
        self.node = node


class Pace:
    """What one node has shown. Times in seconds.

    `unloaded_s` is the first token of an interactive call that has the node to itself. `residue_s` is what a take-back
    leaves of the engine's step, at most; 0 until one was seen. `gap_s` is between two tokens of an interactive call
    with little beside it. `stall_s` is what may be read beside an answer: a short one, a quartile, is then not
    stretched to more than GAP times. They are worked out with each sample: they are asked for far more often.
    """

    __slots__ = (
        "_answers",
        "_by_length",
        "_gaps",
        "_kept",
        "_mean_arrival",
        "_residue",
        "_slowest",
        "_unloaded",
        "_usual_p95_s",
        "_worst",
        "arrived_at",
        "gap_s",
        "residue_s",
        "stall_s",
        "unloaded_s",
    )

    def __init__(self) -> None:
        self._by_length: dict[int, float] = {}
        self._slowest: dict[int, Recent] = {}
        self._worst: dict[int, float | None] = {}
        self._unloaded = Recent(64)
        self._residue = Recent(32)
        self._gaps = Recent(64)
        self._answers = Recent(64)
        self._kept: float | None = None
        self._mean_arrival: float | None = None
        self.arrived_at = LONG_AGO
        self.residue_s = 0.0
        self.unloaded_s: float | None = None
        self.gap_s: float | None = None
        self.stall_s: float | None = None
        self._usual_p95_s: float | None = None

    # What is known

    @property
    def kept(self) -> float | None:
        """Share of a taken-back prompt that is not read again: 1 with a prefix cache that holds, 0 without one."""
        return self._kept

    def prefill_s(self, prompt_tokens: int) -> float | None:
        """How long a prompt takes to be read, by the nearest length that was seen."""
        if not self._by_length:
            return None
        length = prompt_tokens.bit_length()
        rate = self._by_length.get(length)
        if rate is None:
            rate = self._by_length[min(self._by_length, key=lambda known: abs(known - length))]
        return rate * prompt_tokens

    def known_s(self, prompt_tokens: int) -> float | None:
        """The same, None where no prompt of a like length was seen: long ones take far more than their share."""
        length = prompt_tokens.bit_length()
        seen = any(near in self._by_length for near in (length - 1, length, length + 1))
        return self.prefill_s(prompt_tokens) if seen else None

    def worst(self, length: int) -> float | None:
        """Seconds a token of the slowest prompt of late, by the nearest length class that was seen often enough.

        What a prefix cache keeps makes most prompts faster than one it has not met, so no mean is asked here. The
        answer is kept until another prompt is read quietly.
        """
        if length not in self._worst:
            often = [known for known, rates in self._slowest.items() if len(rates) >= OFTEN]
            nearest = min(often, key=lambda known: abs(known - length), default=None)
            self._worst[length] = None if nearest is None else self._slowest[nearest].quantile(1.0)
        return self._worst[length]

    def left_s(self, prompt_tokens: int, past: Past | None) -> float | None:
        """How long reading a prompt would take now, of which a part may be kept.

        One that was read for longer than it should take is held to take at least as long again. None where nobody
        knows, because none of a like length was read yet.
        """
        whole = self.known_s(prompt_tokens)
        if whole is None or past is None or past.read_s <= 0.0:
            return whole
        return whole - past.read_s if past.read_s < whole else max(whole, past.read_s)

    def objective_s(self, stated: float | None) -> float | None:
        """The p95 of first tokens interactive calls should have: as stated, else a multiple of the unloaded p95.

        Where the engine's step alone takes longer than that multiple, no objective below the step can be kept beside
        batch, and `auto` means what the step allows.
        """
        if stated is not None:
            return stated
        unloaded, usual_p95 = self.unloaded_s, self._usual_p95_s
        if unloaded is None or usual_p95 is None:
            return None
        return max(OBJECTIVE * usual_p95, unloaded + self.residue_s)

    def silence(self, seconds: float, now: float) -> float:
        """How likely no interactive call comes for so long, if they come at random."""
        if self._mean_arrival is None:
            return 1.0
        return math.exp(-seconds / max(self._mean_arrival, now - self.arrived_at, 1e-9))

    # What is seen

    def chat_came(self, now: float) -> None:
        """An interactive call was sent to the node."""
        before, mean = self.arrived_at, self._mean_arrival
        if mean is not None:
            self._mean_arrival = mean + ARRIVALS_WEIGHT * (now - before - mean)
        elif before > LONG_AGO:
            self._mean_arrival = now - before
        self.arrived_at = now

    def read_quietly(self, prompt_tokens: int, seconds: float, *, chat: bool) -> None:
        """A prompt was read with nothing beside it and nothing of it kept."""
        if prompt_tokens > 0:
            length = prompt_tokens.bit_length()
            self._by_length[length] = _mixed(self._by_length.get(length), seconds / prompt_tokens, WEIGHT)
            if length not in self._slowest:
                self._slowest[length] = Recent(128)
            self._slowest[length].add(seconds / prompt_tokens)
            self._worst.clear()
        if chat:
            self._unloaded.add(seconds)
            self.unloaded_s, self._usual_p95_s = _believed(self._unloaded, 0.5), _believed(self._unloaded, 0.95)

    def took(self, prompt_tokens: int, seconds: float) -> None:
        """An interactive call that took batch back had its first token after so long."""
        alone = self.prefill_s(prompt_tokens)
        self._residue.add(max(0.0, seconds - alone) if alone is not None else seconds)
        self.residue_s = _believed(self._residue, 0.9) or 0.0

    def answered(self, tokens: int) -> None:
        """An interactive call ended well, so many tokens long."""
        self._answers.add(tokens)
        self._bear()

    def wrote(self, tokens: int, seconds: float) -> None:
        """An interactive call wrote so many tokens after its first in so long."""
        if tokens > 0:
            self._gaps.add(seconds / tokens)
            self.gap_s = _believed(self._gaps, 0.25)
            self._bear()

    def _bear(self) -> None:
        tokens = _believed(self._answers, 0.25)
        self.stall_s = None if self.gap_s is None or tokens is None else (GAP - 1.0) * self.gap_s * tokens

    def resumed(self, prompt_tokens: int, seconds: float, past: Past, *, keeps: bool = True) -> None:
        """A prompt that was taken back before is read: how much of it had been kept?

        All its parts together are what it takes, if the engine is one that `keeps` what it reads and no prompt of its
        length was read faster. One that took longer may only have met less of a cache than those before it.
        """
        if prompt_tokens <= 0:
            return
        length, total = prompt_tokens.bit_length(), past.spent_s + seconds
        known = self._by_length.get(length)
        whole = (total if keeps else seconds) if known is None else known * prompt_tokens
        if known is None or total <= whole:
            self._by_length[length] = min(whole, total) / prompt_tokens
        elif keeps:
            self._by_length[length] = _mixed(known, total / prompt_tokens, WEIGHT)
        worst = self._at_worst(length, keeps=keeps)
        whole = whole if worst is None else max(whole, worst * prompt_tokens)
        if past.spent_s > 0.05 * whole:
            again = max(0.0, seconds - max(0.0, whole - past.spent_s))
            share = max(0.0, 1.0 - again / past.spent_s)
            if share >= KEPT or worst is not None:
                self._kept = _mixed(self._kept, share, WEIGHT)

    def lost(self, prompt_tokens: int, seconds: float, past: Past, *, keeps: bool = True) -> float:
        """A prompt is taken back after so long. Returns the prompt tokens that were read for nothing.

        One that was read for far longer than any of its length takes, and is not through, shows that nothing is kept.
        """
        length = prompt_tokens.bit_length()
        known, worst = self._by_length.get(length), self._at_worst(length, keeps=keeps)
        whole = None if known is None else known * prompt_tokens
        past.spent_s += seconds
        if worst is not None and past.times and past.spent_s > HOPELESS * worst * prompt_tokens:
            self._kept = _mixed(self._kept, 0.0, WEIGHT)
        kept = 1.0 if self._kept is None else self._kept
        read_s = past.read_s + seconds
        share = 1.0 if whole is None else min(1.0, seconds / whole) if whole > 0 else 0.0
        past.times += 1
        past.read_s = read_s * kept
        untold = 0.0 if keeps else UNTOLD_LOSS
        past.losses += untold if self._kept is None else share * (1.0 - kept)
        return share * (1.0 - kept) * prompt_tokens

    def _at_worst(self, length: int, *, keeps: bool) -> float | None:
        """Seconds a token that a prompt of this length surely does not exceed, None where nobody can say.

        An engine with a cache reads most prompts faster than one the cache has not met, so few samples say nothing.
        """
        if not keeps:
            return self._by_length.get(length)
        rates = self._slowest.get(length)
        return rates.quantile(1.0) if rates is not None and len(rates) >= OFTEN else None


def _mixed(mean: float | None, sample: float, weight: float) -> float:
    return sample if mean is None else mean + weight * (sample - mean)


def _believed(recent: Recent, share: float) -> float | None:
    """A quantile of enough samples."""
    return recent.quantile(share) if len(recent) >= ENOUGH else None
