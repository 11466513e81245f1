"""Log probabilities as results spell them: with the bytes and the text of each token beside its id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batonq.engine.logprobs import TokenLogprobs
from batonq.engine.text import Vocabulary


def spell(entries: Sequence[TokenLogprobs | None], vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """The fields of a `producer.schema.TokenLogprob` for each token; None where there is none."""
    return [None if entry is None else _spell(entry, vocabulary) for entry in entries]


def _spell(entry: TokenLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        **_token(entry.token_id, entry.logprob, vocabulary),
        "rank": entry.rank,
        "top_logprobs": [_token(token_id, logprob, vocabulary) for token_id, logprob in entry.top],
    }


def _token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    shown = vocabulary.token_bytes[token_id]
    return {"token": shown.decode("utf-8", "replace"), "token_id": token_id, "bytes": list(shown), "logprob": logprob}
