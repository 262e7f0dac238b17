"""What an operator may say of the relay: where it is, what may go there, what it may cost, when batches use it."""

from typing import Self

from pydantic import Field, model_validator

from router.settings.section import Section
from router.settings.values import Clash, Count, Dollars, Models, Prices, Ratio, Seconds, Secret, Url


class RelaySpend(Section):
    """What the relay may cost. A call that would break the cap is served as if there were no relay."""

    usd_a_day: Dollars
    """Most US dollars in any 24 hours, by all calls and all routers at the store. 0 lets only free calls out."""
    input_usd: Prices = Field(min_length=1)
    """US dollars for a million prompt tokens, by public model name. Every model of the relay needs its price."""
    output_usd: Prices = Field(default_factory=dict)
    """US dollars for a million output tokens, by public model name; 0 for a model that is not named."""


class RelayEntry(Section):
    """The OpenAI-compatible service outside the house. Prompts of the models named here may leave it."""

    url: Url
    """Where it listens, in the same form as a node's `url`."""
    api_key: Secret | None = None
    """Key sent to the relay. Without it calls that need the relay are refused; a caller's key is never passed on."""
    models: Models = Field(min_length=1)
    """Models that may go there: a list of names, or a mapping of public name to the relay's own. Others never leave."""
    spend: RelaySpend | None = None
    """What it may cost; empty is without limit."""

    @model_validator(mode="after")
    def _prices_are_known(self) -> Self:
        spend = self.spend
        if spend is None:
            return self
        found = [
            *((("input_usd",), f"the price of the relay's model '{model}' is missing")
              for model in self.models if model not in spend.input_usd),
            *(((name, model), "is no model of the relay")
              for name in ("input_usd", "output_usd") for model in getattr(spend, name) if model not in self.models),
        ]  # fmt: skip
        if found:
            raise Clash(*((("relay", "spend", *at), text) for at, text in found))
        return self


class BatchRelay(Section):
    """Whether lines of batches may go to the relay when their batch is late. Until then they wait for nodes."""

    enabled: bool = False
    """Let lines of late batches out, for models and callers that may use the relay. Needs `relay.spend`."""
    last_share: Ratio = 0.25
    """Only in this last part of its window a batch can be late; it is when the pace of the last minute is too slow."""
    within_s: Seconds = 900
    """With less than this left, and in the last part of its window, it is late whatever the pace."""
    spend_share: Ratio = 0.5
    """Most of `relay.spend.usd_a_day` that lines of batches may use."""
    calls: Count = 8
    """Most lines at the relay at once."""
