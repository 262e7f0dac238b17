"""The parts of a running router, made from what the operator wrote. `router.app` puts them together.

Rules: a function makes one part and keeps nothing; only here are settings translated into what the rooms below take.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from pydantic import SecretStr

from router.api.auth import Caller, Keyring
from router.api.terms import Terms
from router.core.call import Workload
from router.core.node import Node, Spec, State
from router.core.spend import Price, Spend
from router.core.yielding import Policy
from router.dispatch import request
from router.dispatch.admission import Limits
from router.dispatch.dispatcher import Patience
from router.dispatch.leg import Way
from router.dispatch.trip import RELAY
from router.fleet.fleet import Fleet
from router.jobs.receivers import Receivers, secret_bytes
from router.settings import NodeEntry, Settings
from router.upstream.pool import Bounds, Pool
from router.upstream.target import Target


def node(entry: NodeEntry, reserve: float, moved: Callable[[Node, State], None] | None = None) -> Node:
    """A node nobody has looked at yet. `reserve` is the share of its room that batch never holds, if it serves both.

    `moved` is told when its state changes.
    """
    spec = Spec(
        name=entry.name,
        url=entry.url,
        pools=entry.pools,
        engine=entry.engine,
        models=entry.models,
        context=entry.context,
        sequences=entry.max_sequences,
        tokens=entry.kv_tokens,
    )
    made = Node(spec, reserve=reserve if Workload.INTERACTIVE in entry.pools else 0.0)
    made.moved = moved
    return made


def target(url: str, api_key: SecretStr | None) -> Target:
    """Where a server is and the key it is asked with."""
    return Target.parse(url, api_key=None if api_key is None else api_key.get_secret_value())


def limits(settings: Settings) -> dict[Workload, Limits]:
    """How long and how much each workload may wait."""
    pools = {Workload.INTERACTIVE: settings.pools.interactive, Workload.BATCH: settings.pools.batch}
    return {
        workload: Limits(patience_s=pool.patience_s, queue_calls=pool.queue_calls, queue_bytes=pool.queue_bytes)
        for workload, pool in pools.items()
    }


def policy(settings: Settings) -> Policy:
    """How batch makes way for chat."""
    pools = settings.pools
    stated = pools.interactive.ttft_p95_ms
    return Policy(
        ttft_p95_s=None if stated == "auto" else stated / 1000, mode=pools.batch.mode, lend=pools.interactive.lend
    )


def patience(settings: Settings) -> Patience:
    """The bounds of one leg, and of trying again."""
    upstream = settings.upstream
    return Patience(
        first_byte_s=upstream.first_byte_s,
        first_byte_per_prompt_token_s=upstream.first_byte_per_prompt_token_s,
        retries=upstream.retries,
        retry_ratio=upstream.retry_ratio,
    )


def ways(settings: Settings, targets: Mapping[str, Target]) -> dict[str, Way]:
    """The ways to all nodes, by name."""
    return {entry.name: _way(settings, entry.name, targets[entry.name], entry.models) for entry in settings.nodes}


def relay(settings: Settings) -> Way | None:
    """The way out of the house, if there is one."""
    entry = settings.relay
    return None if entry is None else _way(settings, RELAY, target(entry.url, entry.api_key), entry.models)


def spend(settings: Settings) -> Spend | None:
    """The relay's account, if what it costs has a limit."""
    entry = settings.relay.spend if settings.relay is not None else None
    if entry is None:
        return None
    prices = {
        model: Price(input=usd, output=entry.output_usd.get(model, 0.0)) for model, usd in entry.input_usd.items()
    }
    return Spend(prices, entry.usd_a_day, settings.batches.relay.spend_share)


def keyring(settings: Settings) -> Keyring:
    """Who may call."""
    return Keyring(
        (key.digest, Caller(name=key.name, workload=key.workload, fallback=key.fallback, admin=key.admin))
        for key in settings.keys
    )


def receivers(settings: Settings) -> Receivers:
    """Who may be told that a batch has ended, and by which secrets it is signed."""
    hooks = settings.webhooks
    own = {
        key.name: [secret_bytes(key.webhook_secret.get_secret_value())] for key in settings.keys if key.webhook_secret
    }
    return Receivers(
        allowed=hooks.allowed_hosts,
        allow_private=hooks.allow_private,
        secrets=[secret_bytes(one.get_secret_value()) for one in (hooks.secret, hooks.previous_secret) if one],
        own=own,
        defaults={key.name: key.webhook_url.get_secret_value() for key in settings.keys if key.webhook_url},
    )


def terms(settings: Settings) -> Terms:
    """The bounds kept towards clients."""
    server = settings.server
    return Terms(
        request_body_bytes=server.request_body_bytes,
        head_s=server.head_s,
        heartbeat_s=server.heartbeat_s,
        write_stall_s=server.write_stall_s,
        long_prompt_tokens=settings.classify.long_prompt_tokens,
        cors_origins=server.cors_origins,
    )


class View(msgspec.Struct, frozen=True):
    """A node as a scrape sees it: calls and room in KV tokens by workload, and `capacity` when that is known."""

    name: str
    up: bool
    state: str
    running: Mapping[str, int]
    room: Mapping[str, int]


def view(node: Node) -> View:
    """How a node stands now."""
    budget = node.budget
    held = {workload: budget.held(workload) for workload in Workload}
    room = {str(workload): room.tokens for workload, room in held.items()}
    if budget.tokens is not None:
        room["capacity"] = budget.tokens
    running = {str(workload): room.sequences for workload, room in held.items()}
    return View(node.name, node.state in (State.READY, State.PROBATION), node.state, running, room)


@dataclass(kw_only=True)
class NodeReport:
    """What one look at a node found. None is unknown; `problem` is None when it can be used."""

    name: str
    url: str
    engine: str
    models: list[str]
    context: int | None
    kv_tokens: int | None
    sequences: int | None
    pools: Sequence[str]
    problem: str | None


def report(entry: NodeEntry, node: Node, fleet: Fleet) -> NodeReport:
    """What a look at a node found."""
    models = node.models()
    known = [context for context in map(node.context, models) if context is not None]
    problem = fleet.trouble.get(node.name)
    if problem is None and not models:
        problem = "it serves no model"
    return NodeReport(
        name=node.name,
        url=entry.url,
        engine=node.facts.engine if problem is None else entry.engine,
        models=models,
        context=max(known, default=None),
        kv_tokens=node.budget.tokens,
        sequences=node.budget.sequences,
        pools=sorted(node.spec.pools),
        problem=problem,
    )


def _way(settings: Settings, name: str, target: Target, models: Mapping[str, str]) -> Way:
    upstream = settings.upstream
    bounds = Bounds(connect_s=upstream.connect_s, first_byte_s=upstream.first_byte_s, idle_s=upstream.idle_s)
    return Way(name=name, target=target, pool=Pool(target, bounds), starts=request.starts(target), models=models)
