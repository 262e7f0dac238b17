"""Where nodes come from that nobody wrote into the settings."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from router.core.call import Workload
from router.settings.section import Section
from router.settings.values import AgentUrl, Clash, Count, HostName, ModelName, Models, NodePort, Seconds, Secret, Url


class DnsEntry(Section):
    """One name whose addresses are nodes, all alike. They are spoken to over http."""

    name: HostName
    """The name to look up. Every address is a node, named by the name's first label, the address and the port."""
    port: NodePort
    """Where the servers listen."""
    family: Literal["any", "ipv4", "ipv6"] = "any"
    """Which addresses to take. Where every server has one of each kind, say which, or each is taken for two nodes."""
    pools: frozenset[Workload] = Field(frozenset(Workload), min_length=1)
    """As `pools` of a node."""
    engine: Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "openai"] = "auto"
    """As `engine` of a node."""
    api_key: Secret | None = None
    """As `api_key` of a node."""
    models: Models = Field(default_factory=dict)
    """As `models` of a node."""
    context: Count | None = None
    """As `context` of a node."""
    max_sequences: Count | None = None
    """As `max_sequences` of a node."""
    kv_tokens: Count | None = None
    """As `kv_tokens` of a node."""
    agent: AgentUrl | None = None
    """As `agent` of a node, for every address: `http://{host}:9400`. `{host}` is the address, `{port}` the server's
    port, `{port+1000}` so much above it."""

    @property
    def source(self) -> str:
        """What it is called in logs and metrics."""
        return f"{self.name}:{self.port}"


class GpustackEntry(Section):
    """A GPUStack 2.x server whose model instances are nodes, each reached at its own address and port over http."""

    url: Url
    """Where GPUStack's server is, not one of its workers: `http://gpustack.example`."""
    api_key: Secret
    """A key of GPUStack with the scope `management`. It is sent to GPUStack only, never to an instance."""
    models: Models = Field(default_factory=dict)
    """Models whose instances are nodes: a list of GPUStack's names, or a mapping of public name to GPUStack's. Empty
    takes every model."""
    pools: frozenset[Workload] = Field(frozenset(Workload), min_length=1)
    """Workloads that may run on instances: `[interactive]`, `[batch]` or both."""
    model_pools: dict[ModelName, Annotated[frozenset[Workload], Field(min_length=1)]] = Field(default_factory=dict)
    """The same for instances of single models, by GPUStack's name, in place of `pools`."""
    engine: Literal["auto", "vllm", "sglang", "llamacpp", "ollama", "openai"] = "auto"
    """As `engine` of a node."""
    agent: AgentUrl | None = None
    """As `agent` of a node, for every instance: `http://{host}:{port+1000}` is the instance's address, and its own port
    plus 1000, which differs where a worker runs several; `{port}` is the port itself."""
    poll_s: Seconds = 15
    """Time between two readings of the whole list. Changes are heard at once from GPUStack's watch; this is the net."""
    timeout_s: Seconds = 10
    """Longest wait for the list."""
    silence_s: Seconds = 45
    """A watch that is silent for this long is dead and opened again. GPUStack sends a sign of life every 15 s."""

    source: ClassVar[str] = "gpustack"
    """What it is called in logs and metrics."""

    @field_validator("model_pools")
    @classmethod
    def _of_its_models(
        cls, pools: dict[str, frozenset[Workload]], info: ValidationInfo
    ) -> dict[str, frozenset[Workload]]:
        models = set(info.data.get("models", {}).values())
        if models and (strange := sorted(set(pools) - models)):
            at = ("discovery", "gpustack", "model_pools", strange[0])
            raise Clash((at, "is not one of discovery.gpustack.models; write GPUStack's own name"))
        return pools


class Discovery(Section):
    """Where nodes come from beside `nodes`, which win where both have a name or a URL."""

    file: str | None = Field(default=None, min_length=1, max_length=4096)
    """A file that something else writes: a list as `nodes`, in YAML or JSON; variables in it are not filled in."""
    file_every_s: Seconds = 2
    """Time between two looks at the file."""
    dns: tuple[DnsEntry, ...] = Field(default=(), max_length=100)
    """Names with several addresses."""
    dns_every_s: Seconds = 10
    """Time between two look-ups of a name."""
    dns_timeout_s: Seconds = 5
    """Longest wait for one look-up."""
    gpustack: GpustackEntry | None = None
    """A GPUStack server whose model instances are nodes."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source, as it is called in logs and metrics."""
        whole = {"file": self.file, GpustackEntry.source: self.gpustack}
        return (*(name for name, said in whole.items() if said), *(entry.source for entry in self.dns))

    @field_validator("dns")
    @classmethod
    def _names_differ(cls, dns: tuple[DnsEntry, ...]) -> tuple[DnsEntry, ...]:
        first: dict[str, int] = {}
        for index, entry in enumerate(dns):
            if first.setdefault(entry.source, index) != index:
                raise Clash((("discovery", "dns", index, "name"), f"and port are those of dns.{first[entry.source]}"))
        return dns
