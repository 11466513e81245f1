"""A result in the form of OpenAI's responses: chat completions and text completions.

The form is a function of the row and its tokens alone: what differs from run to run (when it ran, what a cache held) is
left out, and `created` is 0, so that the same input gives the same bytes.
"""

from __future__ import annotations

from typing import Any

from batonq.producer.schema import Choice, Result


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
    return {
        "index": choice.index,
        **text,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
    }
