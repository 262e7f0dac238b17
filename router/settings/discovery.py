"""Where nodes come from that nobody wrote into the settings."""

from typing import Literal

from pydantic import Field, field_validator

from router.core.call import Workload
from router.settings.section import Section
from router.settings.values import Clash, Count, HostName, Models, NodePort, Seconds, Secret


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

    @property
    def source(self) -> str:
        """What it is called in logs and metrics."""
        return f"{self.name}:{self.port}"


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

    @property
    def sources(self) -> tuple[str, ...]:
        """Every source, as it is called in logs and metrics."""
        return (*(("file",) if self.file else ()), *(entry.source for entry in self.dns))

    @field_validator("dns")
    @classmethod
    def _names_differ(cls, dns: tuple[DnsEntry, ...]) -> tuple[DnsEntry, ...]:
        first: dict[str, int] = {}
        for index, entry in enumerate(dns):
            if first.setdefault(entry.source, index) != index:
                raise Clash((("discovery", "dns", index, "name"), f"and port are those of dns.{first[entry.source]}"))
        return dns
