"""Check the parameters of transfers from users and clients: refused by name, or within bounds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.kv_transfer import parse_kv_transfer_config
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.engine.transfer.remote.params import TransferParams, offer_params, parse_params
from tokenmill.ipc.address import Address

GOOD = {
    "kv_connector": "TokenMillConnector",
    "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"secret_file": "s", "peers": ["unix:/a", "tcp://b:1"]},
}
OFFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [1, 2, 3, 4],
    "remote_host": "h",
    "remote_port": 5,
    "remote_num_tokens": 32,
    "tp_size": 1,
}


@pytest.mark.parametrize("text", [None, "{}", "null"])
def test_nothing_said_is_nothing_done(text):
    assert parse_kv_transfer_config(text) is None


def test_a_config_is_read():
    config = parse_kv_transfer_config(json.dumps(GOOD))
    assert config is not None and config.consumes and not config.produces
    assert config.timeouts["load"] > 30


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_connector": "LMCacheConnectorV1"}, "unknown kv_connector 'LMCacheConnectorV1'"),
        ({"kv_role": "kv_maybe"}, "kv_role"),
        ({"kv_rank": 0}, "kv_rank"),
        ({"kv_port": 0}, "kv_port"),
        ({"kv_ip": "0.0.0.0"}, "told to consumers"),
        ({"kv_connector_extra_config": {}}, "needs a secret_file"),
        ({"kv_connector_extra_config": {"secret_file": "s"}}, "a consumer needs"),
        ({"kv_connector_extra_config": {"secret_file": "s", "peers": ["b:1"]}}, "peers"),
        ({"kv_connector_extra_config": {"secret_file": "s", "lease_seconds": 0}}, "lease_seconds"),
        ({"kv_connector_extra_config": GOOD["kv_connector_extra_config"] | {"most_lease_seconds": 1}}, "at least"),
        ({"kv_connector_extra_config": {"lease": 1}}, "unknown field `lease`"),
        ({"kv_load_failure_policy": "hope"}, "kv_load_failure_policy"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(change, why):
    with pytest.raises(InvalidConfig, match=why) as caught:
        parse_kv_transfer_config(json.dumps(GOOD | change))
    assert str(caught.value).startswith("--kv-transfer-config: ")


def test_text_that_is_no_json_is_refused():
    with pytest.raises(InvalidConfig, match="--kv-transfer-config"):
        parse_kv_transfer_config("{no")


def test_what_a_producer_offers_a_consumer_reads():
    offer = offer_params("engine", "request", Address("unix:/a"), 32)
    assert offer.remote_block_ids is not None and len(offer.remote_block_ids) == 4
    assert offer != offer_params("engine", "request", Address("unix:/a"), 32), "a nonce is not used twice"
    handles = {offer_params("e", "r", Address("h", 1), 16).handle.nonce for _ in range(50)}
    assert len(handles) == 50 and {len(nonce) for nonce in handles} == {32}


def test_different_numbers_are_different_nonces():
    assert parse_params(OFFER).handle != parse_params(OFFER | {"remote_block_ids": [1, 2, 34]}).handle
    assert parse_params(OFFER).handle.nonce == "00000001000000020000000300000004"


@given(
    st.dictionaries(
        st.sampled_from([*OFFER, "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        ),
    ),
    st.booleans(),
)
def test_any_parameters_are_read_or_refused(params, is_like_an_offer):
    if is_like_an_offer:
        params = OFFER | params
    try:
        parsed = parse_params(params)
    except InvalidRequest as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert message.startswith("kv_transfer_params: ")
        return
    assert isinstance(parsed, TransferParams)
    assert isinstance(parsed.address.port, int) and len(parsed.handle.nonce) <= 32
