"""Text to token ids, and token ids to bytes: the `tokenizer.json` of a model, without transformers.

The table `token_bytes` makes text a function of the token ids alone: bytes are joined token by token, and no decoder
has to look at its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from batonq.engine.errors import ModelNotUsable, UnsupportedModel

_METASPACE = "\u2581"
_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


class Tokenizer:
    """Encodes prompts and says what each token stands for. Made by `from_directory`."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None, eos_token_ids: Iterable[int]) -> None:
        self._backend = backend
        self.bos_token_id = bos_token_id
        #: Any of these ends an output.
        self.eos_token_ids = frozenset(eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._is_byte_level = _is_byte_level(backend)
        self._adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json, and BOS and EOS from generation_config.json, config.json and tokenizer_config.json."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelNotUsable(str(directory), "it has no tokenizer.json")
        backend = tokenizers.Tokenizer.from_file(str(path))
        # What a file says of padding and truncation is about training batches.
        backend.no_padding()
        backend.no_truncation()
        config = read_json(directory / "tokenizer_config.json")
        model = read_json(directory / "config.json") | read_json(directory / "generation_config.json")
        bos, eos = (_token_id(backend, config.get(f"{name}_token")) for name in ("bos", "eos"))
        listed = model.get("eos_token_id")
        from_model = listed if isinstance(listed, list) else [listed]
        return cls(backend, bos, {token for token in (eos, *from_model) if token is not None})

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each token adds to the text; ids without a token stand for nothing.

        A Metaspace decoder drops the space that begins a text; this table keeps it, because an output goes on from a
        prompt. It takes a tenth of a second, so whoever only encodes goes without.
        """
        to_bytes = _byte_level if self._is_byte_level else _byte_fallback
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values()) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = to_bytes(token)
        return table

    @property
    def adds_leading_space(self) -> bool:
        """Whether the tokens of a text begin with a space that the text doesn't have."""
        first = self._backend.encode("a", add_special_tokens=False).ids[:1]
        return any(self.token_bytes[token_id].startswith(b" ") for token_id in first)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; a model's logits may be wider."""
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens that are spelt out in it count as such.

        `add_special_tokens` adds what the tokenizer puts around a text; a BOS that the text has already isn't doubled.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._adds_bos:
            while ids[:2] == [self.bos_token_id] * 2:
                del ids[0]
        return ids


def read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file, `{}` if there is none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotUsable(str(path.parent), f"its {path.name} is not JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def token_text(token: Any) -> str | None:
    """The text of a special token in tokenizer_config.json, which is a string or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = token_text(token)
    return None if text is None else backend.token_to_id(text)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether tokens spell bytes in GPT-2's alphabet; if not, they are text with `▁` for a space."""
    # What pickling a decoder gives is its part of tokenizer.json, without the vocabulary around it.
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else [decoder]
    kinds = [step and step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True
    known = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    replaced = [(step["pattern"], step["content"]) for step in steps if step and step["type"] == "Replace"]
    if not {"Metaspace", "Replace"} & set(kinds) or not known.issuperset(kinds):
        raise UnsupportedModel("decoder", kinds, "ByteLevel, Metaspace, or Replace with ByteFallback")
    if any(pair != ({"String": _METASPACE}, " ") for pair in replaced):
        raise UnsupportedModel("decoder.pattern", replaced, f"{_METASPACE!r} for a space")
    return False


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: themselves where printable in Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _gpt2_alphabet()
_LETTERS = frozenset(_ALPHABET)
_TO_LATIN1 = str.maketrans({letter: chr(byte) for letter, byte in _ALPHABET.items()})


def _byte_level(token: str) -> bytes:
    """As the ByteLevel decoder: a token that isn't spelt in the alphabet is text."""
    return token.translate(_TO_LATIN1).encode("latin-1") if _LETTERS.issuperset(token) else token.encode()


def _byte_fallback(token: str) -> bytes:
    return _BYTE_TOKENS.get(token) or token.replace(_METASPACE, " ").encode()
