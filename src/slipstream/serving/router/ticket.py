"""Tickets: pre-inference returns one, ranking sends it back, and it leads to the same instance.

A ticket is opaque text: a small record (the instance that holds the prefix, its model version, the
behaviours of the prefix, the time of expiry) with a MAC. The MAC covers the user's id, but the
record does not contain it: a ticket works for its own user only and reveals nothing about them. No
router or instance stores tickets; they share only the secret. Touch this when a ticket carries
something else.
"""

import base64
import binascii
import hmac
from collections import Counter

import msgspec

from slipstream.serving.clock import SYSTEM_CLOCK, Clock

MAC_BYTES = 16
MAX_TICKET_CHARACTERS = 512
MIN_SECRET_BYTES = 16


class TicketError(Exception):
    """A ticket cannot be used; `code` is `ticket_invalid` or `ticket_expired`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


class Ticket(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The content of a ticket: an instance holds the prefix of behaviours `[first, end)`.

    Behaviours are counted from the first one ever stored for the user. One that is not `held` was
    not computed: the instance only knows the history, and another may rank as well.
    """

    instance: str
    version: str
    first: int
    end: int
    expires_ms: int
    held: bool = True


class TicketSigner:
    """Issues and reads tickets under one secret."""

    def __init__(self, secret: bytes, lifetime: float = 60.0, clock: Clock = SYSTEM_CLOCK) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a ticket secret has at least {MIN_SECRET_BYTES} bytes")
        self._lifetime, self._clock = lifetime, clock
        self._keyed = hmac.new(secret, digestmod="sha256")  # copied: the secret is read in once
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Ticket)

    def issue(
        self, user: str, instance: str, version: str, first: int, end: int, *, held: bool = True
    ) -> str:
        """Make the ticket for behaviours `[first, end)` of `user`, known to `instance`."""
        expires_ms = int((self._clock.wall_time() + self._lifetime) * 1000)
        record = self._encoder.encode(Ticket(instance, version, first, end, expires_ms, held))
        sealed = base64.urlsafe_b64encode(self._mac(record, user) + record)
        return sealed.rstrip(b"=").decode("ascii")

    def read(self, text: str, user: str) -> Ticket:
        """Read a ticket of `user`; `TicketError` when it is forged, another user's or expired."""
        try:
            if len(text) > MAX_TICKET_CHARACTERS:
                raise ValueError
            padded = text.encode("ascii") + b"=" * (-len(text) % 4)
            sealed = base64.b64decode(padded, altchars=b"-_", validate=True)
        except (ValueError, binascii.Error) as error:
            raise TicketError(
                "ticket_invalid", "the ticket is not one of ours; ask for one at /v1/preinfer"
            ) from error
        mac, record = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(record, user)):
            raise TicketError(
                "ticket_invalid",
                "the ticket was not issued here for this user; ask for one at /v1/preinfer",
            )
        ticket = self._decoder.decode(record)
        if ticket.expires_ms < self._clock.wall_time() * 1000:
            raise TicketError(
                "ticket_expired",
                "the ticket has expired; ask for a new one at /v1/preinfer, or rank without one",
            )
        return ticket

    def find(self, text: str | None, user: str, counts: Counter[str]) -> Ticket | None:
        """Read a ticket of `user`; one that cannot be used is counted by its code and ignored.

        A ticket only says where a prefix may be, so without it a request is served all the same.
        """
        if text is None:
            return None
        try:
            return self.read(text, user)
        except TicketError as error:
            counts[error.code] += 1
            return None

    def _mac(self, record: bytes, user: str) -> bytes:
        name = user.encode("utf-8", "surrogatepass")
        signed = len(record).to_bytes(4, "big") + record + name
        mac = self._keyed.copy()
        mac.update(signed)
        return mac.digest()[:MAC_BYTES]
