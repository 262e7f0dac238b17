"""Machines as step times, and the fleets made of them.

A step that computes P prompt tokens (P_i of sequence i, on top of ctx_i), decodes B sequences and reads K KV tokens
takes

    a + b P + e sum P_i (ctx_i + P_i/2) + c B + d K

The constants of the GPU machines are estimates from public measurements (docs/colocation.md names them); those of
`tiny-vllm` come from single requests to a real vLLM (`loadtests.colocation.virtual.check` fits them). `scaled` makes
prefill dearer or cheaper, to see what a result owes to them.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One node. Times in seconds.

    `chunk` is the token budget of a step, `threshold` the most of it for one long prompt, 0 for no such bound.
    `ingest_s` and `ingest_token_s` pass before a request reaches the scheduler, `token_s` a token on its way out.
    """

    name: str
    engine: str = "vllm"
    a: float
    b: float
    c: float = 0.018e-3
    d: float = 0.0
    e: float = 0.0
    kv_tokens: int
    seqs: int
    chunk: int = 2048
    threshold: int = 0
    context: int = 131072
    priority: bool = False
    ingest_s: float = 0.0156
    ingest_token_s: float = 0.0
    token_s: float = 46e-6

    @property
    def holds(self) -> int:
        """The longest prompt and answer together, in tokens."""
        return self.kv_tokens // self.seqs if self.engine == "llamacpp" else min(self.context, self.kv_tokens)

    def scaled(self, prefill: float) -> "Profile":
        """The same machine with another cost of a prompt token."""
        return replace(self, b=self.b * prefill, e=self.e * prefill)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a chat answer must keep, both: seconds to the first token, mean seconds a token."""

    ttft: float
    tpot: float


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="a6000-70b", a=67e-3, b=0.51e-3, e=6.6e-9, d=0.071e-6, kv_tokens=180_000, seqs=32),
        Profile(name="a6000-70b-fp8", a=40e-3, b=0.5e-3, e=6.6e-9, d=0.071e-6, kv_tokens=610_000, seqs=64),
        Profile(name="h100-70b", a=18e-3, b=0.085e-3, e=1.2e-9, d=0.031e-6, kv_tokens=469_000, seqs=256),
        Profile(name="a100-70b", a=29e-3, b=0.2e-3, e=3e-9, d=0.05e-6, kv_tokens=470_000, seqs=128),
        Profile(name="4090-8b", a=19.5e-3, b=0.115e-3, e=4.4e-9, d=0.15e-6, kv_tokens=78_000, seqs=64),
        Profile(name="llamacpp-70b", engine="llamacpp", a=68e-3, b=2.1e-3, kv_tokens=65_536, seqs=2, chunk=512),
        Profile(
            name="tiny-vllm",
            a=2.8e-3,
            b=0.02e-3,
            c=0.05e-3,
            e=10.8e-9,
            kv_tokens=1_048_576,
            seqs=8,
            chunk=512,
            context=32768,
            ingest_s=1.5e-3,
            ingest_token_s=2.1e-6,
            token_s=0.0,
        ),
    )
}

FLEETS = {
    "F1": ("a6000-70b",) * 4,
    "F2": ("a6000-70b",) * 3 + ("llamacpp-70b",),
    "F3": ("h100-70b",),
    "F3a": ("a6000-70b",),
    "F4": ("h100-70b",) * 4,
    "F5": ("4090-8b",) * 4,
    "tiny": ("tiny-vllm",),
}

SLOS = {
    "a6000-70b": (Slo(ttft=4.0, tpot=0.25), Slo(ttft=8.0, tpot=0.5), Slo(ttft=30.0, tpot=0.5)),
    "a6000-70b-fp8": (Slo(ttft=4.0, tpot=0.25), Slo(ttft=8.0, tpot=0.5), Slo(ttft=30.0, tpot=0.5)),
    "h100-70b": (Slo(ttft=1.0, tpot=0.06), Slo(ttft=2.0, tpot=0.12), Slo(ttft=8.0, tpot=0.12)),
    "a100-70b": (Slo(ttft=2.0, tpot=0.1), Slo(ttft=4.0, tpot=0.2), Slo(ttft=16.0, tpot=0.2)),
    "4090-8b": (Slo(ttft=1.0, tpot=0.06), Slo(ttft=2.0, tpot=0.12), Slo(ttft=10.0, tpot=0.12)),
    "llamacpp-70b": (Slo(ttft=8.0, tpot=0.25), Slo(ttft=16.0, tpot=0.5), Slo(ttft=60.0, tpot=0.5)),
    "tiny-vllm": (Slo(ttft=0.1, tpot=0.02), Slo(ttft=0.2, tpot=0.04), Slo(ttft=3.0, tpot=0.04)),
}
"""The pair, a looser one, and one for long prompts (W4, W5), by the fleet's first machine."""
