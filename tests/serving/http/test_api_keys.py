"""API keys: lines of text, what each may do, and files that only their owner reads."""

from pathlib import Path

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.http.api_keys import (
    ApiKey,
    Keys,
    parse_key,
    parse_keys,
    read_key_file,
    read_secret_file,
)

SECRET = "0123456789abcdef"


def test_a_line_is_a_secret_and_what_it_may_do():
    assert parse_key(SECRET) == ApiKey(SECRET)
    assert parse_key(f"  {SECRET}  role=admin ".strip()) == ApiKey(SECRET, "admin")
    assert parse_key(f"{SECRET} tenant=shop rate=2.5") == ApiKey(SECRET, "client", "shop", 2.5)
    assert parse_key("words of a key =x role=metrics") == ApiKey("words of a key =x", "metrics")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("short", "at least 16"),
        ("role=admin", "at least 16"),
        (f"{SECRET} role=root", "none of client, metrics, admin"),
        (f"{SECRET} tenant=a/b", "is no name"),
        (f"{SECRET} tenant=", "is no name"),
        (f"{SECRET} role=admin tenant=shop", "has no tenant"),
        (f"{SECRET} rate=0", "no number of requests"),
        (f"{SECRET} rate=nan", "no number of requests"),
        (f"{SECRET} rate=1 rate=2", "twice"),
        (f"{SECRET},{SECRET}", "without commas"),
        ("schlüssel mit umlaut", "printable ASCII"),
    ],
)
def test_a_wrong_line_is_explained_without_its_secret(line: str, says: str):
    with pytest.raises(SlipstreamError, match=says) as refused:
        parse_key(line)
    assert SECRET not in str(refused.value)


def test_a_secret_is_not_shown_by_its_key():
    assert SECRET not in repr(ApiKey(SECRET))


def test_lines_without_a_key_are_skipped_and_no_key_stands_twice():
    assert [k.role for k in parse_keys(["# ours", "", SECRET, f"x{SECRET} role=admin"])] == [
        "client",
        "admin",
    ]
    with pytest.raises(SlipstreamError, match="stands twice"):
        parse_keys([SECRET, f"{SECRET} role=admin"])
    with pytest.raises(SlipstreamError, match="more than"):
        parse_keys([f"{SECRET}{number}" for number in range(10_001)])


@pytest.mark.parametrize(
    ("key", "opens"),
    [
        (ApiKey(SECRET), {"client", "metrics"}),
        (ApiKey(SECRET, tenant="shop"), {"client"}),
        (ApiKey(SECRET, "metrics"), {"metrics"}),
        (ApiKey(SECRET, "admin"), {"client", "metrics", "admin"}),
    ],
)
def test_a_role_opens_its_endpoints_and_no_others(key: ApiKey, opens: set[str]):
    assert {needed for needed in ("client", "metrics", "admin") if key.may(needed)} == opens


def test_a_key_is_accepted_by_its_number_and_nothing_else_is():
    keys = Keys(parse_keys(["the first key of all", "the second key of all"]))
    second = keys.accept(b"the second key of all")
    assert second is not None and second[0] == 1
    offers = (None, b"", b"the first key of al", b"the first key of all ", "schlüssel".encode())
    assert [keys.accept(offered) for offered in offers] == [None] * 5
    assert not Keys() and Keys().accept(b"") is None


def test_a_file_of_keys_is_read_if_nobody_else_can_read_it(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{SECRET}\n")
    path.chmod(0o600)
    assert read_key_file(path) == ("# ours", SECRET)
    path.chmod(0o640)  # a group of the operator's choice
    assert read_key_file(path)
    path.chmod(0o644)
    with pytest.raises(SlipstreamError, match=r"every user can read .*; run `chmod"):
        read_key_file(path)
    path.chmod(0o600)
    path.write_text("# none\n")
    with pytest.raises(SlipstreamError, match="holds no key"):
        read_key_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SlipstreamError, match="it is not text"):
        read_secret_file(path, "key file")
    with pytest.raises(SlipstreamError, match="No such file"):
        read_key_file(tmp_path / "none")
