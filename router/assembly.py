"""The parts of a running router, made from what the operator wrote. `router.app` puts them together.

Rules: a function makes one part and keeps nothing; only here are settings translated into what the rooms below take.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from pydantic import SecretStr, ValidationError

from router.api.auth import Caller
from router.api.terms import Terms
from router.core.budget import kept_back
from router.core.call import Workload
from router.core.care import Care
from router.core.node import UP, Node, Spec
from router.core.spend import Price, Spend
from router.core.yielding import Policy
from router.dispatch import request
from router.dispatch.admission import Limits
from router.dispatch.dispatcher import Patience
from router.dispatch.leg import Way
from router.dispatch.spans import Spans
from router.dispatch.trip import RELAY
from router.errors import SettingsError
from router.fleet.discovery import Addresses, File, Instances, Listed, Resolve, Source
from router.fleet.fleet import Fleet
from router.fleet.gpustack import Gpustack, Instance, node_name
from router.fleet.gpustack.recycle import Restarts
from router.fleet.hooks import Command, Hook, Http
from router.jobs.receivers import Receivers, secret_bytes
from router.settings import DnsEntry, GpustackEntry, NodeEntry, Settings, agent_url, load_nodes
from router.upstream.client import Client
from router.upstream.pool import Bounds, Pool
from router.upstream.target import Target


def listed(entry: NodeEntry) -> Listed:
    """A node as it is told of."""
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
    agent = Target.parse(entry.agent).url("metrics", rooted=True) if entry.agent else None
    return Listed(spec, target(entry.url, entry.api_key), agent)


def reserve(settings: Settings, spec: Spec) -> float:
    """The share of a node's room that batch never holds, if it serves both."""
    return settings.pools.batch.reserve if Workload.INTERACTIVE in spec.pools else 0.0


def sources(settings: Settings, resolve: Resolve, server: Gpustack | None) -> list[Source]:
    """Who tells of nodes beside the settings. `resolve` looks names up, `server` is the GPUStack there is."""
    said = settings.discovery
    found: list[Source] = []
    if said.file is not None:
        found.append(File(Path(said.file), _read_nodes, every_s=said.file_every_s))
    for entry in said.dns:
        found.append(
            Addresses(
                host=entry.name,
                port=entry.port,
                listed=partial(_at_address, entry),
                family=entry.family,
                resolve=resolve,
                every_s=said.dns_every_s,
                timeout_s=said.dns_timeout_s,
            )
        )
    if said.gpustack is not None and server is not None:
        found.append(
            Instances(
                server=server,
                listed=partial(_of_gpustack, said.gpustack),
                name=said.gpustack.source,
                poll_s=said.gpustack.poll_s,
                silence_s=said.gpustack.silence_s,
            )
        )
    return found


def gpustack(settings: Settings, client: Client) -> Gpustack | None:
    """The GPUStack server, with the key it is asked with, if there is one."""
    entry = settings.discovery.gpustack
    if entry is None:
        return None
    return Gpustack(client, target(entry.url, entry.api_key), timeout_s=entry.timeout_s)


def _of_gpustack(entry: GpustackEntry, instance: Instance) -> Listed | None:
    """A node of an instance, None if its model is not wanted. Raises SettingsError."""
    models = {public: own for public, own in entry.models.items() if own == instance.model_name}
    if entry.models and not models:
        return None
    said = {
        "name": node_name(instance),
        "url": instance.url,
        "models": models,
        "pools": entry.model_pools.get(instance.model_name, entry.pools),
        "engine": entry.engine,
        "agent": _agent(entry, instance.host, instance.port),
    }
    try:
        return listed(NodeEntry.model_validate(said))
    except ValidationError as error:
        raise SettingsError(f"its {error.errors()[0]['loc'][0]} cannot be that of a node") from None


def _read_nodes(path: Path) -> list[Listed]:
    return [listed(entry) for entry in load_nodes(path)]


def _at_address(entry: DnsEntry, address: str) -> Listed:
    """A node of a name, at one of its addresses. A node's name has at most 64 characters; an address has up to 39."""
    host = f"[{address}]" if ":" in address else address
    label = entry.name.partition(".")[0].replace("_", "-").strip("-")[:18] or "dns"
    name = f"{label}-{address.replace(':', '-')}-{entry.port}"
    said = {key: getattr(entry, key) for key in DnsEntry.model_fields if key in NodeEntry.model_fields}
    said |= {"name": name, "url": f"http://{host}:{entry.port}", "agent": _agent(entry, host, entry.port)}
    return listed(NodeEntry.model_validate(said))


def _agent(entry: DnsEntry | GpustackEntry, host: str, port: int | None) -> str | None:
    """Where the agent beside a discovered server is, if one was said to be."""
    return None if entry.agent is None or port is None else agent_url(entry.agent, host, port)


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
        ttft_p95_s=None if stated == "auto" else stated / 1000,
        mode=pools.batch.mode,
        lend=pools.interactive.lend,
        degraded_chat=settings.care.degraded_chat == "some",
    )


def patience(settings: Settings) -> Patience:
    """The bounds of one leg, and of trying again."""
    upstream = settings.upstream
    return Patience(
        first_byte_s=upstream.first_byte_s,
        first_byte_per_prompt_token_s=upstream.first_byte_per_prompt_token_s,
        retries=upstream.retries,
        retry_ratio=upstream.retry_ratio,
        first_byte_least_s=settings.care.first_byte_least_s,
    )


def bounds(settings: Settings) -> Bounds:
    """The bounds of one connection."""
    upstream = settings.upstream
    return Bounds(connect_s=upstream.connect_s, first_byte_s=upstream.first_byte_s, idle_s=upstream.idle_s)


def way(name: str, to: Target, models: Mapping[str, str], pool: Pool) -> Way:
    """A way there over connections of that pool."""
    return Way(name=name, target=to, pool=pool, starts=request.starts(to), models=models)


def relay(settings: Settings, before: Way | None = None) -> Way | None:
    """The way out of the house, if there is one. One to the same place as `before` goes on with its connections."""
    entry = settings.relay
    if entry is None:
        return None
    to = target(entry.url, entry.api_key)
    kept = before is not None and before.target.place == to.place
    return way(RELAY, to, entry.models, before.pool if before is not None and kept else Pool(to, bounds(settings)))


def spend(settings: Settings) -> Spend | None:
    """The relay's account, if what it costs has a limit."""
    entry = settings.relay.spend if settings.relay is not None else None
    if entry is None:
        return None
    prices = {
        model: Price(input=usd, output=entry.output_usd.get(model, 0.0)) for model, usd in entry.input_usd.items()
    }
    return Spend(prices, entry.usd_a_day, settings.batches.relay.spend_share)


def spans(settings: Settings, clock: Callable[[], float]) -> Spans | None:
    """Who makes spans of calls, if anybody wants them. Raises SettingsError when the extra is not installed."""
    entry = settings.otel
    if entry.endpoint is None:
        return None
    headers = {name: value.get_secret_value() for name, value in entry.headers.items()}
    made = Spans.open(entry.endpoint, headers, entry.sample, clock)
    made.relay = settings.relay.url if settings.relay is not None else ""
    return made


def callers(settings: Settings) -> list[tuple[bytes, Caller]]:
    """Who may call, by the digest of the key."""
    return [
        (key.digest, Caller(name=key.name, workload=key.workload, fallback=key.fallback, admin=key.admin))
        for key in settings.keys
    ]


def care(settings: Settings) -> Care:
    """What the router may do about nodes by itself."""
    said, recycle = settings.care, settings.care.recycle
    return Care(
        enabled=recycle.enabled,
        max_unavailable=said.max_unavailable,
        drain_s=said.drain_s,
        settle_s=recycle.settle_s,
        ready_s=recycle.ready_s,
        before_limit_s=recycle.before_limit_s,
        rss_limit_bytes=recycle.rss_limit_bytes,
        cooldown_s=recycle.cooldown_s,
        failures=recycle.failures,
    )


def hook(settings: Settings, client: Client, server: Gpustack | None = None) -> Hook | None:
    """How nodes are restarted, if anybody said how. `server` is the GPUStack there is."""
    recycle = settings.care.recycle
    if recycle.gpustack:
        if server is None:
            raise SettingsError("care.recycle.gpustack: needs discovery.gpustack, to know whom to ask")
        return Restarts(server, within_s=recycle.hook_s)
    if recycle.command:
        return Command(recycle.command)
    if recycle.http is None:
        return None
    said, headers = recycle.http, {}
    if said.secret is not None:
        secret = said.secret.get_secret_value()
        headers[said.header] = f"Bearer {secret}" if said.header.lower() == "authorization" else secret
    return Http(client, said.method, said.url, headers, recycle.hook_s)


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
    """A node as a scrape sees it: calls by workload; KV tokens by workload, and capacity and the like where known."""

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
        room["reserve"] = max(0, kept_back(budget.tokens, budget.reserve))
        room["foreign"] = budget.foreign.tokens
    running = {str(workload): room.sequences for workload, room in held.items()}
    return View(node.name, node.state in UP, node.state, running, room)


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
