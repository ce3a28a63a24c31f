"""What may be fetched, and what is made of data URLs."""

from base64 import b64encode
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.errors import ApiError
from services.frontend.media.rules import MediaRules, data_of, is_public

INNER = "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 240.0.0.1".split()
INNER += "255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fc00::1 ff02::1 2001:db8::1".split()
OUTER = "93.184.215.14 8.8.8.8 2606:2800:21f:cb07:6820:80da:af6b:8b2c ::ffff:8.8.8.8 64:ff9b::808:808".split()


@pytest.mark.parametrize("address", INNER)
def test_addresses_within_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", OUTER)
def test_addresses_outside_are_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_in_another_form_is_the_same_address(address: IPv4Address) -> None:
    number = int(address)
    as_6to4 = f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1"
    for form in (f"::ffff:{address}", f"64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}", as_6to4):
        assert is_public(form) == is_public(str(address)), form


def test_one_inner_address_among_several_is_enough_to_refuse() -> None:
    rules = MediaRules(100)
    rules.check_addresses("example.org", ["8.8.8.8"], "p")
    with pytest.raises(ApiError, match="not on the public network") as refused:
        rules.check_addresses("example.org", ["8.8.8.8", "10.0.0.1"], "p")
    assert refused.value.param == "p"


def test_named_hosts_may_be_anywhere_and_no_others_are_asked() -> None:
    rules = MediaRules(100, allowed_domains=("Images.internal",))
    rules.check_host("images.internal", "p")
    rules.check_addresses("images.internal", ["10.0.0.1"], "p")
    for host in ("example.org", "images.internal.example.org"):
        with pytest.raises(ApiError, match="allowed domains"):
            rules.check_host(host, "p")


@given(st.binary(min_size=1, max_size=64))
def test_a_data_url_is_what_it_holds(content: bytes) -> None:
    url = f"data:image/png;base64,{b64encode(content).decode()}"
    assert data_of(url, len(content), "p") == content
    with pytest.raises(ApiError) as refused:
        data_of(url, len(content) - 3, "p")
    assert refused.value.code == "media_too_large"


@given(st.text(max_size=40))
def test_any_data_url_is_read_or_refused(rest: str) -> None:
    assert read_or_param(f"data:{rest}") in (True, "p")


def read_or_param(url: str) -> object:
    """Whether something was read; if the URL was refused, the parameter."""
    try:
        return bool(data_of(url, 1000, "p"))
    except ApiError as refused:
        return refused.param
