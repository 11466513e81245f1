"""The module that a worker's `--engine` names in tests: the null engine, sized by the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batonq.engine.engine import Engine
from tests.support import null_engine

#: JSON object of keyword arguments of `null_engine.build`.
ENVIRONMENT = "BATONQ_TEST_NULL_ENGINE"


class Frontend:
    def encode(self, text: str) -> list[int]:
        return null_engine.ByteEncoder().encode(text)

    def encode_word(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


def load_engine(options: dict[str, Any]) -> tuple[Engine[list[list[int]]], Path]:
    return null_engine.build(**json.loads(os.environ.get(ENVIRONMENT, "{}"))), Path()


def load_frontend(_directory: str) -> Frontend:
    return Frontend()
