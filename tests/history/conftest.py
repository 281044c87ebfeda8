"""Each kind of history store, empty, for the tests that hold for both."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.redis_server import free_port, redis_server


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis"), free_port()) as port:
        yield port


@pytest.fixture
def redis_url(redis_port: int) -> str:
    redis.Redis(port=redis_port).flushall()
    return f"redis://127.0.0.1:{redis_port}/0"


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.system)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'history.db'}"
    return request.getfixturevalue("redis_url")
