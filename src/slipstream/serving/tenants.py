"""Tenants: a key with a tenant sees only that tenant's users.

Inside (store, prefixes, tickets) such a user is called `tenant␟user`. The sign ␟ is refused in the
users of requests, so nobody can name a user of another tenant. Touch this when users are told apart
in another way.
"""

import re
from collections.abc import Awaitable, Callable

from slipstream.errors import SlipstreamError
from slipstream.serving.request_errors import BadRequest

SEPARATOR = "\N{SYMBOL FOR UNIT SEPARATOR}"
LAST_CHARACTER = chr(0x10FFFF)
MAX_TENANT_CHARACTERS = 32
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_TENANT_CHARACTERS}}}")


def check_tenant(name: str) -> None:
    """Refuse what is no name of a tenant."""
    if not _NAME.fullmatch(name):
        raise SlipstreamError(
            f"tenant '{name[:40]}' is no name; use 1 to {MAX_TENANT_CHARACTERS} letters, digits, "
            "dots, dashes and underscores"
        )


def inner_user(tenant: str | None, user: str) -> str:
    """Return the name under which a user of a request is kept."""
    if SEPARATOR in user:
        raise BadRequest(f"a user's id may not contain the sign {SEPARATOR}; send it without")
    return user if tenant is None else f"{tenant}{SEPARATOR}{user}"


async def list_users(
    read: Callable[[str | None, int], Awaitable[list[str]]],
    tenant: str | None,
    after: str | None,
    limit: int,
) -> list[str]:
    """Return the users of a tenant in order, by the names it knows, those after `after`.

    `read(after, limit)` reads users of a store, of all tenants.
    """
    if tenant is not None:
        start = f"{tenant}{SEPARATOR}"
        found = await read(inner_user(tenant, after or ""), limit)
        return [outer_user(user) for user in found if user.startswith(start)]
    users: list[str] = []
    while len(users) < limit:
        page = await read(after, limit)
        for user in page:
            after = user
            if SEPARATOR in user:  # of a tenant: go on behind its last user
                after = user.partition(SEPARATOR)[0] + SEPARATOR + LAST_CHARACTER
                break
            users.append(user)
        else:
            break
    return users[:limit]


def outer_user(user: str) -> str:
    """Return the name a tenant knows its user by."""
    return user.rpartition(SEPARATOR)[2]
