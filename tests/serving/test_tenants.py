"""Users of tenants: kept apart by name, listed apart."""

import asyncio

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.request_errors import BadRequest
from slipstream.serving.tenants import check_tenant, inner_user, list_users, outer_user


def test_a_tenants_user_cannot_be_named_by_others():
    assert inner_user(None, "ann") == "ann"
    assert outer_user(inner_user("shop", "ann/b:c")) == "ann/b:c"
    assert len({inner_user(tenant, "ann") for tenant in (None, "shop", "sho", "shop-2")}) == 4
    for user in ("shop␟ann", "␟", "ann␟"):
        for tenant in (None, "shop"):
            with pytest.raises(BadRequest, match="may not contain"):
                inner_user(tenant, user)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a␟b", "x" * 33, "ü", "a\n"])
def test_names_of_tenants_are_plain(name: str):
    with pytest.raises(SlipstreamError, match="is no name"):
        check_tenant(name)
    check_tenant("Shop-2.de_x")


def test_each_tenant_lists_its_own_users_and_no_key_without_tenant_lists_them():
    own = {None: ["a", "b", "shop", "shopper", "z"], "shop": ["a", "x"], "b": ["1", "2", "3"]}
    stored = sorted(inner_user(tenant, user) for tenant, users in own.items() for user in users)

    async def read(after: str | None, limit: int) -> list[str]:
        return [user for user in stored if after is None or user > after][:limit]

    def listed(tenant: str | None, after: str | None = None, limit: int = 10) -> list[str]:
        return asyncio.run(list_users(read, tenant, after, limit))

    assert {tenant: listed(tenant) for tenant in own} == own
    for limit in range(1, 6):
        assert listed(None, limit=limit) == own[None][:limit]
        assert listed("b", limit=limit) == own["b"][:limit]
    assert listed(None, "b") == ["shop", "shopper", "z"]
    assert listed("b", "1") == ["2", "3"]
    assert listed("nobody") == []
