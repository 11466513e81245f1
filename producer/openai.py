"""A result in the form of OpenAI's responses: chat completions and text completions.

The form is a function of the row and its tokens alone: what differs from run to run (when it ran, what a cache held) is
left out, and `created` is 0, so that the same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batonq.producer.schema import Choice, Result, TokenLogprob, TopLogprob


def completion(result: Result, request_id: str, *, chat: bool) -> dict[str, Any]:
    """The body of the response to one request that has output."""
    usage = result.usage
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": result.model,
        "choices": [_choice(choice, chat) for choice in result.choices],
        "usage": usage
        and {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        # Not OpenAI's: what it takes to have the same tokens again.
        "batonq": _reproduction(result),
    }
    if result.prompt_logprobs is not None:  # vLLM's
        body["prompt_logprobs"] = [token and token.model_dump() for token in result.prompt_logprobs]
    return body


def _reproduction(result: Result) -> dict[str, Any]:
    effective = result.effective
    return {
        # A greedy output does not depend on the seed, which may have been drawn by lot.
        "seed": None if effective is not None and effective.greedy else result.seed,
        "sampling": effective and effective.model_dump(mode="json", exclude_defaults=True, exclude={"seed"}),
        "numerics": result.numerics,
        "exact": result.exact,
    }


def _choice(choice: Choice, chat: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"message": {"role": "assistant", "content": choice.text}} if chat else {"text": choice.text}
    logprobs = choice.logprobs
    form = _chat_logprobs if chat else _completion_logprobs
    return {
        "index": choice.index,
        **text,
        "logprobs": None if logprobs is None else form(logprobs),
        "finish_reason": choice.finish_reason,
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: TopLogprob) -> dict[str, Any]:
        return {"token": token.token, "logprob": token.logprob, "bytes": token.bytes}

    content = [entry(token) | {"top_logprobs": [entry(top) for top in token.top_logprobs]} for token in tokens]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """In parallel lists. The drawn token is among the alternatives, as OpenAI has it."""
    alternatives = [{_name(top): top.logprob for top in (*t.top_logprobs, t)} for t in tokens]
    return {
        "tokens": [_name(token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": alternatives if any(token.top_logprobs for token in tokens) else None,
        "text_offset": _offsets(tokens),
    }


def _name(token: TopLogprob) -> str:
    """A token's text; of one that is no whole characters its bytes, so that two such tokens differ."""
    try:
        bytes(token.bytes).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.token


def _offsets(tokens: Sequence[TokenLogprob]) -> list[int]:
    """Where in the text each token begins, in characters: how many of them begin before it."""
    offsets = [0]
    for token in tokens:
        begun = sum(byte & 0xC0 != 0x80 for byte in token.bytes)
        offsets.append(offsets[-1] + begun)
    return offsets[:-1]
