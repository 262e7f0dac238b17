"""The kinds of value a setting can have, each with the words for what is wrong with it.

Refusals name the rule and never show the value: it may be a secret that was put in the wrong place.
"""

import hashlib
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr

from router.jobs.receivers import secret_bytes

Loc = tuple[str | int, ...]
"""The way from the root of the settings to a value: `("nodes", 0, "url")`."""
Tree = dict[str, "Tree"] | list["Tree"] | str | int | float | bool | None
"""What a file can hold, plainly."""
DAY_S = 86_400
WEEK_S = 604_800
GIB = 2**30
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
HOOK_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:]+")
LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?")
AGENT_PART = re.compile(r"\{(?:host|port(?:\+(\d{1,5}))?)\}")
MOST_PORT = 65_535
TAKEN_NAMES = frozenset({"relay", "other", "none"})
"""Words that stand beside node names in headers and metric labels."""


class Clash(ValueError):
    """Values that are each fine and not together. `found` holds the place of each in the file and what is wrong."""

    def __init__(self, *found: tuple[Loc, str]) -> None:
        super().__init__("; ".join(text for _, text in found))
        self.found = found


# Validators raise ValueError whatever is wrong (hence TRY004): pydantic reports no other.


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")  # noqa: TRY004
    return value


def _url(value: str) -> str:
    try:
        url = urlsplit(value)
        well_formed = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or not _visible(value):
        raise ValueError("must be a URL such as http://127.0.0.1:8001 or https://host/v1")
    if url.username is not None or url.password is not None:
        raise ValueError("must not hold a user name or password; use api_key")
    if "?" in value or "#" in value:
        raise ValueError("must not hold a query or fragment")
    return value.rstrip("/")


def _agent(value: str) -> str:
    if re.search(r"[{}]", AGENT_PART.sub("", value)):
        raise ValueError("may hold {host}, {port} and {port+1000}, and no other braces")
    if "{host}" not in value:
        raise ValueError("must hold {host}: each node has an agent of its own")
    _url(agent_url(value, "127.0.0.1", 1) or "")
    return value


def agent_url(template: str, host: str, port: int) -> str | None:
    """Where the agent beside a server is, by a template; None where no port is left for it.

    `{host}` is the server's host as it stands in a URL, `{port}` its port, `{port+1000}` so much above it.
    """
    ports = [port + int(more or 0) for more in AGENT_PART.findall(template)]
    if any(one > MOST_PORT for one in ports):
        return None
    return AGENT_PART.sub(lambda part: host if part[0] == "{host}" else str(port + int(part[1] or 0)), template)


def _origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"https?://[^/?#@\s]+", value):
        raise ValueError("must be '*' or an origin such as https://chat.example.org")
    return value


def _store(value: SecretStr) -> SecretStr:
    if not re.match(r"sqlite:///.|postgresql://[^/]", value.get_secret_value()):
        raise ValueError("must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME")
    return value


def _secret(value: SecretStr) -> SecretStr:
    if not value.get_secret_value() or not _visible(value.get_secret_value()):
        raise ValueError("must be printable ASCII without spaces, and not empty")
    return value


def _digest(value: object) -> object:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError("must be text; quote it")  # noqa: TRY004
    if value.startswith("sha256:"):
        if not (hashed := DIGEST.fullmatch(value)):
            raise ValueError("must hold 64 lower-case hexadecimal digits after sha256:")
        return bytes.fromhex(hashed[1])
    return hashlib.sha256(_secret(SecretStr(value)).get_secret_value().encode()).digest()


def _name(value: str) -> str:
    if value in TAKEN_NAMES:
        raise ValueError("is a word with a meaning of its own here; choose another name")
    return value


def _host(value: str) -> str:
    name = value.removesuffix(".").lower()
    if not all(LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError("must be a DNS name such as vllm.models.svc.cluster.local")
    return name


def _model(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be printable")
    return value


def _renamings(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    if len(set(map(str, value))) < len(value):
        raise ValueError("names a model twice")
    return {str(item): item for item in value}


def _hook_host(value: str) -> str:
    if not HOOK_HOST.fullmatch(value):
        raise ValueError("must be a host name such as hooks.example.org, *.example.org for all below it, or an address")
    return value.lower()


def _hook_secret(value: SecretStr) -> SecretStr:
    secret_bytes(value.get_secret_value())
    return value


def _hook_url(value: SecretStr) -> SecretStr:
    if not re.match(r"https?://[^/?#@\s]", value.get_secret_value()):
        raise ValueError("must be a URL such as https://hooks.example.org/batches")
    return value


def _visible(value: str) -> bool:
    return value.isascii() and all("!" <= char <= "~" for char in value)


HookHost = Annotated[str, AfterValidator(_hook_host)]
HookSecret = Annotated[SecretStr, AfterValidator(_hook_secret)]
HookUrl = Annotated[SecretStr, AfterValidator(_hook_url)]
Seconds = Annotated[float, BeforeValidator(_number), Field(gt=0, le=DAY_S, allow_inf_nan=False)]
Patience = Annotated[float, BeforeValidator(_number), Field(ge=0, le=WEEK_S, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1, allow_inf_nan=False)]
Dollars = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1_000_000, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=10**9)]
Size = Annotated[int, BeforeValidator(_number), Field(ge=1024, le=64 * GIB)]
Memory = Annotated[int, BeforeValidator(_number), Field(ge=2**20, le=2**50)]
Word = Annotated[str, Field(min_length=1, max_length=4096)]
Name = Annotated[str, Field(pattern=NAME), AfterValidator(_name)]
Url = Annotated[str, AfterValidator(_url)]
AgentUrl = Annotated[str, AfterValidator(_agent)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
Digest = Annotated[bytes, BeforeValidator(_digest), PlainSerializer(lambda digest: f"sha256:{digest.hex()}")]
ModelName = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_model)]
Models = Annotated[dict[ModelName, ModelName], BeforeValidator(_renamings)]
Prices = dict[ModelName, Dollars]
HostName = Annotated[str, Field(max_length=253), AfterValidator(_host)]
Port = Annotated[int, BeforeValidator(_number), Field(ge=0, le=MOST_PORT)]
NodePort = Annotated[int, BeforeValidator(_number), Field(ge=1, le=MOST_PORT)]
Retries = Annotated[int, BeforeValidator(_number), Field(ge=0, le=10)]
Ratio = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1, allow_inf_nan=False)]
SecondsAToken = Annotated[float, BeforeValidator(_number), Field(ge=0, le=10, allow_inf_nan=False)]
Origin = Annotated[str, AfterValidator(_origin)]
StoreUrl = Annotated[SecretStr, AfterValidator(_store)]
