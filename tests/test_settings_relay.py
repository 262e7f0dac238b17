"""What an operator may say of the relay's cost, and of batches that use it."""

import pytest

from router import assembly
from router.core.call import Usage
from router.errors import SettingsError
from router.settings import load

RELAY = "relay: {url: 'https://r/v1', models: [a, b],\n"
NODES = 'nodes: [{name: n, url: "http://127.0.0.1:8001"}]\n'


def read(tmp_path, text):
    path = tmp_path / "F"
    path.write_text(NODES + text)
    return load(path, {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            RELAY + "  spend: {usd_a_day: 1,\n    input_usd: {a: 1}}}\n",
            "F:4: relay.spend.input_usd: the price of the relay's model 'b' is missing",
        ),
        (
            RELAY + "  spend: {usd_a_day: 1, input_usd: {a: 1, b: 1},\n    output_usd: {c: 1}}}\n",
            "F:4: relay.spend.output_usd.c: is no model of the relay",
        ),
        (
            RELAY + "}\nbatches: {relay: {enabled: true}}\n",
            "F:4: batches.relay.enabled: batches use a relay only within relay.spend; set it",
        ),
        (
            "batches: {relay: {enabled: true}}\n",
            "F:2: batches.relay.enabled: batches use a relay only within relay.spend; set it",
        ),
        (RELAY + "  spend: {input_usd: {a: 1, b: 1}}}\n", "F:3: relay.spend.usd_a_day: is required"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, text, told):
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, text)
    assert str(caught.value).replace(f"{tmp_path}/", "") == told


def test_prices_and_shares_become_the_account(tmp_path):
    prices = "  spend: {usd_a_day: 20, input_usd: {a: 1, b: 2}, output_usd: {a: 3}}}\n"
    spend = assembly.spend(read(tmp_path, RELAY + prices + "batches: {relay: {enabled: true, spend_share: 0.25}}\n"))
    assert spend is not None
    assert (spend.usd_a_day, spend.batch_share) == (20, 0.25)
    assert (spend.cost("a", Usage(10**6, 10**6)), spend.cost("b", Usage(10**6, 10**6))) == (4, 2)
    assert assembly.spend(read(tmp_path, RELAY + "}\n")) is None, "without a cap there is no account"
