"""What an operator may say about webhooks."""

from collections.abc import Iterator, Sequence

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from router.errors import HookRefused
from router.jobs.receivers import Receivers
from router.settings.section import Section
from router.settings.values import HookHost, HookSecret, Loc, Seconds


class Webhooks(Section):
    """Telling callers' servers that a batch has ended: OpenAI's `batch.*` events, signed by Standard Webhooks."""

    allowed_hosts: tuple[HookHost, ...] = Field(default=(), max_length=1000)
    """Hosts that may be told, `*.example.org` for every name below one. Empty sends no webhooks."""
    secret: HookSecret | None = None
    """What events are signed with: `whsec_` and the base64 of 24 to 64 random bytes. Needed with `allowed_hosts`."""
    previous_secret: HookSecret | None = None
    """Signed with as well, while receivers change over to a new `secret`."""
    allow_private: bool = False
    """Let an allowed host be a private or loopback address, and its URL be http."""
    timeout_s: Seconds = 15
    """Longest attempt, from the look-up of the name to the status."""
    retry_s: tuple[Seconds, ...] = Field(default=(5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400), max_length=50)
    """Waits between one attempt and the next; after the last the event is given up. The default takes three days."""

    @field_validator("secret")
    @classmethod
    def _signed(cls, secret: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if secret is None and info.data.get("allowed_hosts"):
            raise ValueError("is needed with allowed_hosts: whsec_ and the base64 of 32 random bytes")
        return secret


def unfit(webhooks: Webhooks | None, urls: Sequence[SecretStr | None]) -> Iterator[tuple[Loc, str]]:
    """Keys whose receiver may not be told. Nothing is said beside trouble in `webhooks` itself."""
    if webhooks is None:
        return
    receivers = Receivers(allowed=webhooks.allowed_hosts, allow_private=webhooks.allow_private)
    for index, url in enumerate(urls):
        if url is None:
            continue
        try:
            receivers.read(url.get_secret_value())
        except HookRefused as error:
            yield ("keys", index, "webhook_url"), f"{error}; see webhooks"
