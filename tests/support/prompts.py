"""Prompts for the real model: Python's own documentation topics, cut at fixed places."""

from __future__ import annotations

from pydoc_data.topics import topics


def passages(count: int, characters: int = 160) -> list[str]:
    """The beginnings of the first `count` long topics, by name; always the same."""
    names = sorted(name for name, text in topics.items() if len(text) > 2 * characters)
    return [topics[name].strip()[:characters] for name in names[:count]]
