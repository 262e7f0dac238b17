"""What an operator may say, as frozen nouns.

One class a section of the file. The text under each attribute is its documentation: `docs/configuration.md` is made
from it, so a key cannot exist undocumented. Units are in the name (`_s` seconds, `_bytes`, `_tokens`); every number has
a bound a sane installation never meets. Unknown keys are refused. Secrets are `SecretStr` or a digest.
"""

import ipaddress
from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from router.core.call import Workload
from router.core.yielding import Mode
from router.settings.care import Care
from router.settings.discovery import Discovery
from router.settings.otel import Otel
from router.settings.relay import BatchRelay, RelayEntry
from router.settings.section import Section
from router.settings.values import (
    Clash,
    Count,
    Digest,
    HookSecret,
    HookUrl,
    Loc,
    Models,
    Name,
    Origin,
    Patience,
    Port,
    Ratio,
    Retries,
    Seconds,
    SecondsAToken,
    Secret,
    Share,
    Size,
    StoreUrl,
    Url,
)  # fmt: skip
from router.settings.webhooks import Webhooks, unfit


class Server(Section):
    """The people's door."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.:_-]+$")
    """Address to listen on. An address that others can reach needs `keys`."""
    port: Port = 8080
    """Port to listen on; 0 takes any free one."""
    allow_public_without_keys: bool = False
    """Listen on an address that others can reach although no key is set: anybody who can connect may use the nodes."""
    request_body_bytes: Size = 64 * 2**20
    """Largest request body; over it a caller gets 413 before the rest is read."""
    header_bytes: Size = 65_536
    """Largest request head (request line and headers together)."""
    cors_origins: tuple[Origin, ...] = ()
    """Web pages that may call from a browser: origins, or `*` for any. Empty answers no preflight."""
    drain_s: Seconds = 600
    """After SIGTERM, how long running answers may go on before they are ended."""
    keepalive_s: Count = 75
    """Whole seconds an idle client connection stays open; longer than a load balancer's own idle time."""
    head_s: Seconds = 290
    """Longest wait of a caller that does not stream for the head of its answer; Node's fetch gives up at 300."""
    heartbeat_s: Seconds = 15
    """A streaming caller that waits gets an SSE comment this often, so that proxies between keep the connection."""
    write_stall_s: Seconds = 60
    """A client that reads nothing for this long is let go, and its node with it."""

    @property
    def public(self) -> bool:
        """Whether others than this machine can reach the address."""
        try:
            return not ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host != "localhost"


class Store(Section):
    """Where state is kept."""

    url: StoreUrl = SecretStr("sqlite:///var/ebbtide.db")
    """Database: `sqlite:///PATH` (relative to the working directory) or `postgresql://USER:PASSWORD@HOST/NAME`."""


class Classify(Section):
    """How a workload is told when nobody says it."""

    long_prompt_tokens: Count = 8192
    """A prompt over this many tokens is batch unless a header or a key says otherwise."""


class Queue(Section):
    """Calls that wait for room."""

    patience_s: Patience
    """Longest wait for room; then the relay, and without one 503 with Retry-After."""
    queue_calls: Count = 1024
    """Most calls that wait at once; one more is refused."""
    queue_bytes: Size = 256 * 2**20
    """Most body bytes that wait at once; a call over it is refused."""


class InteractivePool(Queue):
    """Calls somebody is watching."""

    patience_s: Patience = 2
    """Longest wait for room; then the relay, and without one 503 with Retry-After."""
    ttft_p95_ms: Annotated[float, Field(gt=0, le=600_000)] | Literal["auto"] = "auto"
    """First token that 95 of 100 calls should have within this many milliseconds, beside batch. `auto` is twice
    what as many have with nothing else to do on the node, or what one step of its engine allows."""
    lend: bool = False
    """Whether batch may use nodes of this pool alone while no interactive call runs there and the context suffices."""


class BatchPool(Queue):
    """Calls somebody will come back for."""

    patience_s: Patience = 3600
    """Longest wait for room; then the relay, and without one 503 with Retry-After."""
    mode: Mode = Mode.ENFORCE
    """`enforce` takes room back from batch when chat comes; `shadow` only counts how often it would have."""
    reserve: Share = 0.25
    """Share of a node's room that batch never holds when interactive calls may run there too, 0 up to 1."""


class Pools(Section):
    """What each workload may do while it waits."""

    interactive: InteractivePool = InteractivePool()
    """Calls somebody is watching."""
    batch: BatchPool = BatchPool()
    """Calls somebody will come back for."""


class NodeEntry(Section):
    """One server that can answer."""

    name: Name
    """Its name in headers, logs and metrics: letters, digits, `.`, `_`, `-`."""
    url: Url
    """Where it listens. A path that ends in a version (`/v1`, `/v1-openai`) stands as it is, else `/v1` is added."""
    pools: frozenset[Workload] = Field(frozenset(Workload), min_length=1)
    """Workloads that may run here: `[interactive]`, `[batch]` or both. A node in both is shared in time, not split."""
    engine: Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "openai"] = "auto"
    """Which engine it is, so which dialect its load is read in. `auto` asks it; `openai` reads only its model list."""
    api_key: Secret | None = None
    """Key sent to this node and to no other. A caller's own key is never passed on."""
    models: Models = Field(default_factory=dict)
    """Models offered: a list of names, or a mapping of public name to the node's own. Empty offers all it lists."""
    context: Count | None = None
    """Longest prompt and answer together in tokens, when the node does not say or should be used for less."""
    max_sequences: Count | None = None
    """Most sequences at once, when the node does not say or should be used for less."""
    kv_tokens: Count | None = None
    """Tokens its KV cache holds, when the node does not say or should be used for less."""
    agent: Url | None = None
    """Where an `ebbtide agent` beside it listens, which tells its memory: `http://10.0.0.5:9400`."""


class Batches(Section):
    """Durable batch jobs: OpenAI's Batches API."""

    enabled: bool = True
    """Offer `/v1/files`, `/v1/uploads` and `/v1/batches`. Without it no database is opened."""
    max_file_bytes: Size = 200 * 2**20
    """Largest input file of a batch."""
    max_lines: Count = 50_000
    """Most lines of one batch."""
    several_models: bool = True
    """Whether one batch may ask for several models; OpenAI allows one."""
    retries: Retries = 5
    """Most attempts of one line that failed through a node's fault. Being put back for other reasons is not counted."""
    lease_s: Seconds = 30
    """A router that has not renewed its claim on a line for this long loses it to another."""
    sweep_s: Seconds = 1
    """Time between two looks for batches that are over or past their window."""
    keep_s: Count | None = None
    """Seconds a finished batch is kept after its end; empty keeps it."""
    output_keep_s: Count | None = 2_592_000
    """Seconds result files are kept when the batch does not say; empty keeps them until they are deleted."""
    relay: BatchRelay = BatchRelay()
    """Whether lines of late batches may go to the relay."""


class FileStore(Section):
    """Files of callers: OpenAI's Files and Uploads API."""

    max_bytes: Size = 512 * 2**20
    """Largest file."""
    batch_keep_s: Count | None = 2_592_000
    """Seconds a batch's input file is kept when its sender does not say; empty keeps it until it is deleted."""


class QuotaEntry(Section):
    """What one caller may hold in the store. Empty is without limit."""

    files: Count | None = None
    """Most files."""
    bytes: Count | None = None
    """Most bytes in files."""
    batches: Count | None = None
    """Most batches that are not finished."""
    lines: Count | None = None
    """Most lines that wait, over all batches."""
    tokens: Count | None = None
    """Most estimated prompt tokens that wait, over all batches."""


class KeyEntry(Section):
    """One caller. Only the SHA-256 digest of the key is kept."""

    name: Name
    """Who holds it; this, never the key, is what logs show."""
    digest: Digest = Field(alias="key", min_length=1, repr=False)
    """The key itself (best as `${VARIABLE}`), or its hash as `sha256:` and 64 hexadecimal digits."""
    workload: Workload | None = None
    """Workload of every call made with it; empty lets each call be told by what it looks like."""
    fallback: bool = True
    """Whether its calls may go to the relay."""
    admin: bool = False
    """Whether its holder may act on nodes, and sees all callers' batches on the dashboard and may end them."""
    quota: QuotaEntry | None = None
    """What it may hold in files and batches; empty is without limit."""
    webhook_url: HookUrl | None = None
    """Told when a batch ends that names no `webhook` of its own. Its host must be one of `webhooks.allowed_hosts`."""
    webhook_secret: HookSecret | None = None
    """Signs its events instead of `webhooks.secret`, so that no other caller's receiver can forge them."""


class Upstream(Section):
    """Bounds on one leg of a call to a node or the relay. There is no total bound: a long answer may take its time."""

    connect_s: Seconds = 5
    """Longest wait for a connection."""
    first_byte_s: Seconds = 120
    """Longest wait for the head of an answer, and for its first token, whatever the prompt."""
    first_byte_per_prompt_token_s: SecondsAToken = 0.005
    """Added to `first_byte_s` for every prompt token, so that a long prefill is not taken for a dead node."""
    idle_s: Seconds = 60
    """Longest silence inside an answer, after its first token."""
    retries: Retries = 1
    """Most further legs of one call after a node failed before anything was answered."""
    retry_ratio: Ratio = 0.1
    """Most retries as a share of recent calls, so that retries never double the load of a fleet in trouble."""


class Probe(Section):
    """How nodes are looked at."""

    every_s: Seconds = 2
    """Time between two looks at a node."""
    timeout_s: Seconds = 2
    """Longest wait for one answer of a look."""


class Log(Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    format: Literal["json", "text"] = "json"
    """One JSON object a line, or `key=value` text."""
    calls: bool = True
    """One line for every finished call. It never holds prompts, answers or keys."""


class Settings(Section, BaseSettings):
    """Everything an operator said, checked as a whole. Made by `load`."""

    server: Server = Server()
    """The people's door."""
    store: Store = Store()
    """Where state is kept."""
    classify: Classify = Classify()
    """How a workload is told when nobody says it."""
    pools: Pools = Pools()
    """What each workload may do while it waits."""
    nodes: tuple[NodeEntry, ...] = Field((), max_length=1000)
    """Servers that can answer."""
    discovery: Discovery = Discovery()
    """Where nodes come from beside `nodes`."""
    relay: RelayEntry | None = None
    """The service outside the house that calls may fall back to."""
    care: Care = Care()
    """What is done about nodes that become slower, leak, or are to be restarted."""
    webhooks: Webhooks = Webhooks()
    """Telling callers' servers that a batch has ended."""
    keys: tuple[KeyEntry, ...] = Field((), max_length=10_000)
    """Callers. Empty lets everybody in, and so needs a loopback `server.host`."""
    batches: Batches = Batches()
    """Durable batch jobs: OpenAI's Batches API."""
    files: FileStore = FileStore()
    """Files of callers: OpenAI's Files and Uploads API."""
    upstream: Upstream = Upstream()
    """Bounds on one leg of a call."""
    probe: Probe = Probe()
    """How nodes are looked at."""
    otel: Otel = Otel()
    """Spans of calls for OpenTelemetry."""
    log: Log = Log()
    """What is written to standard error."""

    @classmethod
    def of(cls, sources: tuple[PydanticBaseSettingsSource, ...]) -> Self:
        """What the sources say, the strongest first. Raises ValidationError."""
        return cls(_build_sources=(sources, {}))  # type: ignore[call-arg]  # mypy sees fields only

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is given: neither this process's environment nor any file is read unasked."""
        return (init_settings,)

    @field_validator("nodes")
    @classmethod
    def _nodes_differ(cls, nodes: tuple[NodeEntry, ...]) -> tuple[NodeEntry, ...]:
        return differing(nodes)

    @field_validator("relay")
    @classmethod
    def _someone_answers(cls, relay: RelayEntry | None, info: ValidationInfo) -> RelayEntry | None:
        found = info.data.get("discovery")
        if relay is None and info.data.get("nodes") == () and found is not None and not found.sources:
            raise Clash((("nodes",), "at least one node, or a relay, is needed"))
        return relay

    @field_validator("care")
    @classmethod
    def _control_needs_a_relay(cls, care: Care, info: ValidationInfo) -> Care:
        if care.canary.enabled and "relay" in info.data and info.data["relay"] is None:
            raise Clash((("care", "canary", "enabled"), "canaries compare nodes with a relay; set relay"))
        return care

    @field_validator("batches")
    @classmethod
    def _relayed_within_a_cap(cls, batches: Batches, info: ValidationInfo) -> Batches:
        relay = info.data.get("relay")
        if batches.relay.enabled and "relay" in info.data and (relay is None or relay.spend is None):
            raise Clash((("batches", "relay", "enabled"), "batches use a relay only within relay.spend; set it"))
        return batches

    @field_validator("keys")
    @classmethod
    def _keys_differ(cls, keys: tuple[KeyEntry, ...], info: ValidationInfo) -> tuple[KeyEntry, ...]:
        found = [
            *_repeated("keys", "name", [key.name for key in keys]),
            *_repeated("keys", "key", [key.digest for key in keys]),
        ]
        server = info.data.get("server")
        if not keys and server is not None and server.public and not server.allow_public_without_keys:
            rule = "others can reach this address: set keys, or server.allow_public_without_keys: true"
            found.append((("server", "host"), rule))
        found += unfit(info.data.get("webhooks"), [key.webhook_url for key in keys])
        if found:
            raise Clash(*found)
        return keys


class NodeList(Section):
    """What a file of nodes holds."""

    nodes: tuple[NodeEntry, ...] = Field((), max_length=1000)
    """Servers that can answer."""

    @field_validator("nodes")
    @classmethod
    def _nodes_differ(cls, nodes: tuple[NodeEntry, ...]) -> tuple[NodeEntry, ...]:
        return differing(nodes)


def differing(nodes: tuple[NodeEntry, ...]) -> tuple[NodeEntry, ...]:
    """The nodes, if no two have the same name or URL. Raises Clash."""
    found = [
        *_repeated("nodes", "name", [node.name for node in nodes]),
        *_repeated("nodes", "url", [node.url for node in nodes]),
    ]
    if found:
        raise Clash(*found)
    return nodes


def _repeated(section: str, field: str, values: Sequence[Hashable]) -> Iterator[tuple[Loc, str]]:
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if first.setdefault(value, index) != index:
            yield (section, index, field), f"is the same as {section}.{first[value]}.{field}"
