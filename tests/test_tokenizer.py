"""Tokenizer and chat template: bytes of tokens against the library's own decoder, prompts against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from batonq.engine.chat_template import ChatTemplate
from batonq.engine.errors import ChatTemplateError, ModelNotUsable, NoChatTemplate, UnsupportedModel
from batonq.engine.loading import Frontend
from batonq.engine.tokenizer import Tokenizer
from tests.support.models import smollm2_dir

CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 4

#: SmolLM2's vocabulary has no tokens for some control characters, nor for the bytes F1 to F4 of planes 4 and up.
ENCODABLE = st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"]) | st.sampled_from(
    "\t\n\r"
)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_directory(smollm2_dir())


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(smollm2_dir() / "tokenizer.json"))


def sentencepiece(directory: Path, *, metaspace: bool) -> tokenizers.Tokenizer:
    """A tokenizer as Llama 2 has it: `▁` for spaces, bytes as `<0xAB>`, BOS added."""
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    trained = json.loads(tokenizer.to_str())
    trained["added_tokens"] = trained["added_tokens"][:3]  # byte tokens are no special tokens
    trained["model"]["byte_fallback"] = True
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(trained))
    tokenizer.decoder = (
        decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
        if metaspace
        else decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    return tokenizer


@settings(max_examples=200, deadline=None)
@given(text=st.text(ENCODABLE, max_size=60))
def test_byte_level_tokens_join_to_what_the_library_decodes(
    smollm2: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    ids = smollm2.encode(text)
    joined = b"".join(smollm2.token_bytes[i] for i in ids)
    assert joined == text.encode()
    assert joined.decode() == library.decode(ids, skip_special_tokens=False)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_any_ids_join_to_what_the_library_decodes(
    smollm2: Tokenizer, library: tokenizers.Tokenizer, ids: list[int]
) -> None:
    joined = b"".join(smollm2.token_bytes[i] for i in ids)
    assert joined.decode(errors="replace") == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("metaspace", [False, True])
def test_byte_fallback_tokens_join_but_for_the_first_space(metaspace: bool, tmp_path: Path) -> None:
    library = sentencepiece(tmp_path, metaspace=metaspace)
    tokenizer = Tokenizer.from_directory(tmp_path)

    @settings(max_examples=100, deadline=None)
    @given(text=st.text(alphabet=st.sampled_from("the quick dog  é漢🔥\n"), min_size=1, max_size=30))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes[i] for i in ids).decode()
        assert joined == " " + text  # the tokenizer puts a space before, the library's decoder drops one again
        assert library.decode(ids, skip_special_tokens=False) == text

    check()


def test_bos_is_there_once(tmp_path: Path) -> None:
    sentencepiece(tmp_path, metaspace=False)
    tokenizer = Tokenizer.from_directory(tmp_path)
    plain = tokenizer.encode("the dog")
    assert plain[0] == tokenizer.bos_token_id == 1
    assert plain.count(1) == 1
    assert tokenizer.encode("<s>the dog").count(1) == 1
    assert tokenizer.encode("<s>the dog", add_special_tokens=False).count(1) == 1
    assert tokenizer.encode("the dog", add_special_tokens=False).count(1) == 0


def test_bos_is_there_once_in_a_conversation(tmp_path: Path) -> None:
    """Templates write BOS themselves; one that doesn't has none, as in transformers."""
    sentencepiece(tmp_path, metaspace=False)
    said = [{"role": "user", "content": "the dog"}]
    for template, expected in (
        ("{{ bos_token }}{{ messages[0].content }}", "<s>the dog"),
        ("{{ messages[0].content }}", "the dog"),
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        frontend = Frontend(tmp_path)
        ids = frontend.encode_chat(said)
        assert ids == frontend.tokenizer.encode(expected, add_special_tokens=False)
        assert ids.count(1) == expected.count("<s>")
    assert frontend.encode("<s>the dog") == frontend.encode("the dog")


def test_a_conversation_without_a_template_is_refused(tmp_path: Path) -> None:
    sentencepiece(tmp_path, metaspace=False)
    with pytest.raises(NoChatTemplate) as caught:
        Frontend(tmp_path).encode_chat([{"role": "user", "content": "the dog"}])
    assert (caught.value.code, caught.value.param) == ("no_chat_template", "messages")


def test_the_space_before_a_text(tmp_path: Path, smollm2: Tokenizer) -> None:
    sentencepiece(tmp_path, metaspace=True)
    assert Frontend(tmp_path).vocabulary.strip_leading_space
    assert not smollm2.adds_leading_space


def test_what_ends_an_output(tmp_path: Path, smollm2: Tokenizer) -> None:
    sentencepiece(tmp_path, metaspace=False)
    assert Tokenizer.from_directory(tmp_path).eos_token_ids == {2, 7}
    assert smollm2.eos_token_ids == {2}
    assert {0, 1, 2} <= smollm2.special_token_ids
    assert smollm2.vocab_size == 49152


def test_an_id_without_a_token_stands_for_nothing(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 5}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("漢 end", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    table = Tokenizer.from_directory(tmp_path).token_bytes
    assert table[:2] == [b"a", b""]
    assert "漢 end".encode() in table


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Replace("_", " ")])
def test_a_decoder_that_is_not_known_is_refused(decoder: decoders.Decoder | None, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="decoder"):
        Tokenizer.from_directory(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotUsable, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Ünïcode?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]

TEMPLATES = {
    "control flow and whitespace": """{{ bos_token }}
    {%- for message in messages %}
        {% if message.role == 'system' %}{% continue %}{% endif %}
        [{{ loop.index }}] {{ message.content | trim }}{{ eos_token }}
    {% endfor %}
    {% if add_generation_prompt %}>{% endif %}""",
    "json": "{{ messages | tojson(indent=2) }}|{{ tools is none }}|{{ unk_token is defined }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
}


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()])
def test_a_conversation_is_rendered_as_transformers_does(template: str | None) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 (slow to import, and needed here alone)

    oracle = AutoTokenizer.from_pretrained(smollm2_dir())
    if template is None:
        ours = ChatTemplate.from_directory(smollm2_dir())
    else:
        oracle.chat_template = template
        ours = ChatTemplate(template, {k: v for k, v in oracle.special_tokens_map.items() if isinstance(v, str)})
    for messages in (CONVERSATION, CONVERSATION[1:2]):
        for prompt in (True, False):
            expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.render(messages, add_generation_prompt=prompt) == expected


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    with pytest.raises(NoChatTemplate, match="has no chat template"):
        ChatTemplate.from_directory(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<b>"}, "chat_template": "{{ bos_token }}string"}))
    assert ChatTemplate.from_directory(tmp_path).render([]) == "<b>string"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_directory(tmp_path).render([]) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_directory(tmp_path).render([]) == "file"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_refusal_carries_the_template_s_words(template: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(template, {}).render([])


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="can't be compiled"):
        ChatTemplate("{% for %}", {})


def test_the_year_is_known() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]).isdigit()
