"""What is done about nodes that become slower, leak, or are to be restarted."""

from typing import Literal

from pydantic import Field, model_validator

from router.settings.section import Section
from router.settings.values import Clash, Count, Memory, Seconds, Secret, Url, Word


class HttpHook(Section):
    """A call that has a node restarted. Any answer of 2xx means that it has begun, or is done."""

    url: Url
    """What to call; `{node}` in it is the node's name. The body is `{"node": NAME, "url": URL}`."""
    method: Literal["POST", "PUT", "DELETE"] = "POST"
    """How to call it."""
    header: str = Field(default="authorization", pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Header that carries the secret."""
    secret: Secret | None = None
    """Value of that header; in `authorization` it follows the word Bearer."""


class Recycle(Section):
    """Restarting nodes: how, and when the router does it by itself."""

    enabled: bool = False
    """Recycle by itself. Without it the router only says when it would; the operator may always."""
    command: tuple[Word, ...] = Field(default=(), max_length=100)
    """Hook: a program and its arguments, run without a shell. EBBTIDE_NODE and EBBTIDE_NODE_URL say which node."""
    http: HttpHook | None = None
    """Hook: a call, instead of a command."""
    gpustack: bool = False
    """Hook: GPUStack restarts the one instance in place, instead of a command; needs `discovery.gpustack`."""
    hook_s: Seconds = 120
    """Longest run of the hook; a command is killed then, with all it started."""
    settle_s: Seconds = 2
    """After the hook, so long is waited before the node is asked: the old process may still answer."""
    ready_s: Seconds = 900
    """After the hook, the node must answer one token within this long, or it is down and recycling has failed."""
    before_limit_s: Seconds = 3600
    """Recycle a node whose memory grows when it will reach its limit within this long."""
    rss_limit_bytes: Memory | None = None
    """Recycle a node whose processes hold this much memory; empty leaves it to the growth alone."""
    cooldown_s: Seconds = 3600
    """Not again by itself within this long."""
    failures: Count = 2
    """After so many failures in a row a node is not recycled by itself any more."""

    @model_validator(mode="after")
    def _one_hook(self) -> "Recycle":
        if bool(self.command) + (self.http is not None) + self.gpustack > 1:
            raise Clash((("http",), "there is another hook too; a node is restarted by one of them"))
        if self.enabled and not self.hooked:
            raise Clash((("enabled",), "needs a hook: set command, http or gpustack"))
        return self

    @property
    def hooked(self) -> bool:
        """Whether there is a hook."""
        return bool(self.command) or self.http is not None or self.gpustack


class Canary(Section):
    """One-token calls to nodes and the relay, to tell a slow node from a slow world."""

    enabled: bool = False
    """Send them. Needs a relay."""
    every_s: Seconds = 300
    """Time between two canaries of one node; a node that is loaded gets none."""
    relay_every_s: Seconds = 900
    """Time between two canaries of the relay; they count towards `relay.spend`."""


class Care(Section):
    """What is done about nodes that become slower, leak, or are to be restarted."""

    degraded_chat: Literal["some", "none"] = "some"
    """Chat on a node that is diagnosed as slower: `some` when no other has room, `none` while others can, or a relay
    that canaries do not show to be slower still."""
    first_byte_least_s: Seconds = 15
    """Shortest wait for a first token from a node that is known to be fast; the longest is `upstream.first_byte_s`."""
    drain_s: Seconds = 600
    """How long running calls may go on when a node is taken out to be recycled."""
    max_unavailable: Count = 1
    """Most nodes that may be out at a time for another to be taken out."""
    recycle: Recycle = Recycle()
    """Restarting nodes: how, and when the router does it by itself."""
    canary: Canary = Canary()
    """One-token calls to nodes and the relay, to tell a slow node from a slow world."""
