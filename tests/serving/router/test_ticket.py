"""Tickets: honoured for their user while they last, refused in every other case."""

import base64
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.router.ticket import TicketError, TicketSigner
from tests.support.fake_clock import FakeClock

SECRET = b"a secret of sixteen bytes or more"


def test_a_ticket_comes_back_as_it_was_issued():
    signer = TicketSigner(SECRET)
    ticket = signer.read(signer.issue("ann", "i-3", "v1", 128, 640), "ann")
    assert (ticket.instance, ticket.version, ticket.first, ticket.end) == ("i-3", "v1", 128, 640)


def test_any_process_with_the_secret_reads_it():
    ticket = TicketSigner(SECRET).issue("ann", "i-3", "v1", 0, 5)
    assert TicketSigner(SECRET).read(ticket, "ann").instance == "i-3"


def test_its_mac_is_that_of_other_releases():
    sealed = base64.urlsafe_b64decode(TicketSigner(SECRET).issue("ann", "i-3", "v1", 0, 5) + "==")
    mac, record = sealed[:16], sealed[16:]
    signed = len(record).to_bytes(4, "big") + record + b"ann"
    assert mac == hmac.digest(SECRET, signed, "sha256")[:16]


def test_it_is_opaque_and_does_not_name_the_user():
    text = TicketSigner(SECRET).issue("ann.example", "i-3", "v1", 0, 5)
    assert b"ann.example" not in base64.urlsafe_b64decode(text + "==")


def test_another_users_ticket_is_refused():
    signer = TicketSigner(SECRET)
    with pytest.raises(TicketError) as refused:
        signer.read(signer.issue("ann", "i-3", "v1", 0, 5), "bob")
    assert refused.value.code == "ticket_invalid"


def test_another_secret_is_refused():
    with pytest.raises(TicketError):
        TicketSigner(b"another secret of some length").read(
            TicketSigner(SECRET).issue("ann", "i", "v", 0, 1), "ann"
        )


def test_it_expires():
    clock = FakeClock(1_000.0)
    signer = TicketSigner(SECRET, lifetime=60, clock=clock)
    text = signer.issue("ann", "i-3", "v1", 0, 5)
    clock.moment += 59.9
    signer.read(text, "ann")
    clock.moment += 0.2
    with pytest.raises(TicketError) as refused:
        signer.read(text, "ann")
    assert refused.value.code == "ticket_expired"


def test_every_changed_bit_is_noticed():
    signer = TicketSigner(SECRET)
    sealed = bytearray(base64.urlsafe_b64decode(signer.issue("ann", "i-3", "v1", 0, 5) + "=="))
    for place in range(len(sealed)):
        for bit in range(8):
            sealed[place] ^= 1 << bit
            with pytest.raises(TicketError):
                signer.read(base64.urlsafe_b64encode(bytes(sealed)).decode().rstrip("="), "ann")
            sealed[place] ^= 1 << bit


@given(st.text(max_size=600))
def test_any_text_is_refused_without_another_error(text: str):
    with pytest.raises(TicketError):
        TicketSigner(SECRET).read(text, "ann")


@given(
    user=st.text(max_size=50),
    instance=st.text(max_size=20),
    first=st.integers(0, 2**62),
    count=st.integers(0, 2**62),
)
def test_any_user_and_numbers_survive(user: str, instance: str, first: int, count: int):
    signer = TicketSigner(SECRET)
    text = signer.issue(
        user, "i" + "".join(c for c in instance if c.isascii()), "v", first, first + count
    )
    ticket = signer.read(text, user)
    assert (ticket.first, ticket.end) == (first, first + count)


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="at least 16"):
        TicketSigner(b"short")


def test_a_ticket_tells_whether_its_prefix_is_held():
    signer = TicketSigner(SECRET)
    assert signer.read(signer.issue("ann", "i-3", "v1", 0, 5), "ann").held
    refused = signer.issue("ann", "i-3", "v1", 0, 5, held=False)
    assert not signer.read(refused, "ann").held
