"""The process of a router: its settings, and what it does not load."""

import subprocess
import sys

import msgspec
import pytest

from slipstream.serving.http.router_process import RouterSettings


def test_settings_name_the_instances_and_their_pools():
    text = b'{"instances": [{"name": "i-0", "url": "http://127.0.0.1:1", "pool": "long"}]}'
    settings = msgspec.json.decode(text, type=RouterSettings)
    (address,) = settings.instances
    assert (address.name, address.pool) == ("i-0", "long")
    assert (settings.host, settings.watch_parent) == ("127.0.0.1", False)


@pytest.mark.parametrize(
    "text", [b"{}", b'{"instances": [{"name": "a", "url": "b", "pool": "x"}]}']
)
def test_settings_without_instances_or_with_an_unknown_pool_are_refused(text: bytes):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=RouterSettings)


@pytest.mark.system
def test_a_router_loads_no_torch():
    code = "import sys, slipstream.serving.http.router_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
