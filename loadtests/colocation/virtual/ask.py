"""One thing somebody wants of a node, what was seen of its answer, and one try of it at an engine."""

from typing import Protocol

from loadtests.colocation.virtual.blocks import ENDLESS, Part

CHAT, BATCH = "chat", "batch"


class Ask:
    """A chat request or a line of a batch. `output` is known to the engine alone.

    What a client saw: `due` when it meant to send, `first_at` and `ended_at` of its tokens, the longest
    `stall` between two of them; `refused` when it got no answer. What it cost: `spent` tokens computed for it, over all
    its tries.
    """

    __slots__ = (
        "chain",
        "due",
        "ended_at",
        "first_at",
        "kind",
        "name",
        "output",
        "prompt",
        "refused",
        "spent",
        "stall",
        "tries",
    )

    def __init__(
        self, name: object, kind: str, prompt: int, output: int, *, due: float = 0.0, shared: tuple[Part, ...] = ()
    ) -> None:
        self.name = name
        self.kind = kind
        self.prompt = prompt
        self.output = max(1, output)
        self.due = due
        self.chain = (*shared, Part((kind, name), shared[-1].last if shared else 0, ENDLESS))
        self.first_at = self.ended_at = None
        self.stall = 0.0
        self.refused = False
        self.spent = 0
        self.tries = 0

    @property
    def ttft(self) -> float | None:
        """Seconds from when it was meant to be sent to its first token."""
        return None if self.first_at is None else self.first_at - self.due

    @property
    def tpot(self) -> float:
        """Mean seconds between two tokens."""
        if self.ended_at is None or self.first_at is None or self.output < 2:
            return 0.0
        return (self.ended_at - self.first_at) / (self.output - 1)


class Listener(Protocol):
    """Who sent a try hears what comes back, when it comes back."""

    def spoke(self, seq: "Seq", now: float) -> None:
        """The first token is here."""

    def ended(self, seq: "Seq", now: float) -> None:
        """The last token is here."""


class Seq:
    """One try of an ask at one engine. `need` tokens must be computed for the next one to come out."""

    __slots__ = (
        "arrival",
        "ask",
        "blocks",
        "computed",
        "emitted",
        "gone",
        "listener",
        "need",
        "priority",
        "queued",
        "seen_at",
        "slot",
    )

    def __init__(self, ask: Ask, listener: Listener, priority: int) -> None:
        self.ask = ask
        self.listener = listener
        self.priority = priority
        self.arrival = 0.0
        self.need = ask.prompt
        self.computed = 0
        self.emitted = 0
        self.blocks = 0
        self.seen_at = 0.0
        self.gone = False
        self.queued = False
        self.slot = None

    @property
    def rank(self) -> tuple[int, float]:
        """Priority, then arrival: lower is earlier."""
        return (self.priority, self.arrival)
