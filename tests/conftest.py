"""What tests of workers stand on: a real server of their own, a connection to it, the null model's queue on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from rq import Queue

from batonq.producer import Producer, serializer
from batonq.producer.embedded import EmbeddedServer
from tests.support.servers import server
from tests.support.workers import QUEUE


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with server(tmp_path / "valkey") as running:
        yield running


@pytest.fixture
def connection(valkey: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


@pytest.fixture
def queue(connection: redis.Redis) -> Queue:
    return Queue(QUEUE, connection=connection, serializer=serializer)


@pytest.fixture
def producer(valkey: EmbeddedServer) -> Iterator[Producer]:
    client = Producer(valkey.url, queue=QUEUE)
    yield client
    client.connection.close()
