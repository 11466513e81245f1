"""Messages to a prompt: the model's own Jinja template, in a sandbox, rendered as transformers does.

Template authors write against transformers' `apply_chat_template`: its whitespace settings, its `tojson`,
`raise_exception` and `strftime_now`, and the names of the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batonq.engine.errors import ChatTemplateError, NoChatTemplate
from batonq.engine.tokenizer import read_json, token_text

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template and the special tokens that it may name. Made by `from_directory`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compile(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """From chat_template.jinja or tokenizer_config.json; `NoChatTemplate` if neither has one."""
        config = read_json(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _default(config.get("chat_template"))
        if source is None:
            raise NoChatTemplate(str(directory))
        texts = {name: token_text(config.get(name)) for name in _SPECIAL_TOKENS}
        return cls(source, {name: text for name, text in texts.items() if text is not None})

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; `ChatTemplateError` with the template's own words if it refuses."""
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what a model said, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Template:
    extensions = [loopcontrols, _GenerationTag]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ChatTemplateError(f"the model's chat template can't be compiled: {error}") from error


def _default(template: Any) -> str | None:
    """The template of tokenizer_config.json: a string, or a list of named ones."""
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would put &lt; into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().astimezone().strftime(format_string)
