"""From names to directories to weights: what is found, what is converted once, and what is refused with which words."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from batonq.engine.errors import ModelNotFound, ModelNotUsable, UnsupportedModel
from batonq.engine.models import ModelConfig, ModelSource, load_model, loader, resolve_model, source
from batonq.engine.models.cache import directory_made_once, file_made_once
from batonq.kernels.program import BLOCK_SIZE
from batonq.kernels.reference import ReferenceBackend
from tests.support import models, tiny_models
from tests.support.batches import Piece, forward, make_batch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny-llama"
    tiny_models.save("mha-tied", directory)
    return directory


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATONQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_directory_is_served_under_its_name(tiny: Path, own_cache: Path) -> None:
    found = resolve_model(str(tiny))
    assert found == ModelSource("tiny-llama", tiny)
    model = load_model(found)
    assert (model.name, model.directory, model.max_model_len) == ("tiny-llama", tiny, 256)
    assert model.program.vocab_size == 160
    assert model.program.kv_cache.bytes_per_block == 2 * 3 * 4 * 12 * BLOCK_SIZE * 4


def test_the_digest_is_of_content_not_of_dates_or_places(tiny: Path, own_cache: Path, tmp_path: Path) -> None:
    digest = load_model(ModelSource("a", tiny)).weights_digest
    assert len(digest) == 16
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    assert load_model(ModelSource("b", copy)).weights_digest == digest
    assert load_model(ModelSource("b", copy)).weights_digest == digest  # from the memo
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors")
    assert load_model(ModelSource("b", copy)).weights_digest != digest


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_shards_are_the_same_model(family: str, tmp_path: Path, own_cache: Path) -> None:
    variant = tiny_models.FAMILIES[family]
    tiny_models.save(variant, tmp_path / "one")
    tiny_models.save(variant, tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load_model(ModelSource("x", tmp_path / name)).tensors() for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    next((tmp_path / "many").glob("*.safetensors")).unlink()
    with pytest.raises(ModelNotUsable, match=r"its index names .* which isn't there"):
        load_model(ModelSource("x", tmp_path / "many"))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_bfloat16_files_are_read_as_they_are(family: str, tmp_path: Path, own_cache: Path) -> None:
    stored = tiny_models.make(tiny_models.FAMILIES[family]).to(dtype=torch.bfloat16)  # type: ignore[call-arg]
    stored.save_pretrained(tmp_path / "m", max_shard_size="30KB")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    model = load_model(ModelSource("m", tmp_path / "m"))
    assert {tensor.dtype for name, tensor in model.tensors().items() if "rope" not in name} == {torch.bfloat16}
    backend = ReferenceBackend(model.program, model.tensors(), 2)
    logits = forward(backend, make_batch([Piece(tokens, 0, len(tokens), [0, 1])]))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lack model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "hold unexpectedly extra"),
    ],
)
def test_names_that_do_not_match_are_refused(
    change: Any, words: str, tiny: Path, tmp_path: Path, own_cache: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    model = load_model(ModelSource("m", tmp_path / "m"))
    for read in (model.tensors, model.packed):
        with pytest.raises(ModelNotUsable, match=words):
            read()


def test_names_without_use_are_passed_over(tiny: Path, tmp_path: Path, own_cache: Path) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert "lm_head.weight" not in load_model(ModelSource("m", tmp_path / "m")).tensors()


def test_damaged_files_are_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotUsable, match=r"has no config\.json"):
        load_model(ModelSource("m", tmp_path))
    shutil.copytree(tiny, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelNotUsable, match=r"model\.safetensors can't be read"):
        load_model(ModelSource("m", tmp_path / "m")).tensors()
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ModelNotUsable, match=r"neither model\.safetensors nor"):
        load_model(ModelSource("m", tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ModelNotUsable, match=r"config\.json is not JSON"):
        load_model(ModelSource("m", tmp_path / "m"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": "full_attention"}, "layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": "yes"}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 11}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_carried_out_is_refused_by_field(change: dict[str, Any], field: str, tiny: Path) -> None:
    data = json.loads((tiny / "config.json").read_text())
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_dict(data | change)
    assert caught.value.field == field
    assert field in caught.value.message


def test_rope_is_read_in_the_old_words_too(tiny: Path) -> None:
    data = json.loads((tiny / "config.json").read_text())
    del data["rope_parameters"]
    old = data | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}}
    new = data | {"rope_parameters": {"rope_theta": 500, "rope_type": "linear", "factor": 2.0}}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new)
    assert ModelConfig.from_dict(data).rope.theta == 10000.0


@pytest.mark.parametrize("model_type", tiny_models.FAMILIES)
def test_fields_that_are_left_out_mean_what_they_mean_to_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, hidden_size=512)
    required = (
        "hidden_size intermediate_size vocab_size num_hidden_layers num_attention_heads rms_norm_eps "
        "max_position_embeddings hidden_act"
    )
    said = {name: getattr(config, name) for name in required.split()}
    ours = ModelConfig.from_dict(
        said | {"architectures": [type(tiny_models.make(tiny_models.FAMILIES[model_type])).__name__]}
    )
    assert ours.num_kv_heads == config.num_key_value_heads
    assert ours.head_dim == getattr(config, "head_dim", 512 // config.num_attention_heads)
    assert ours.windows == (getattr(config, "sliding_window", None) or 0,) * config.num_hidden_layers
    assert ours.rope.theta == config.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == config.tie_word_embeddings


def test_windows_of_qwen_go_by_layer(tiny: Path) -> None:
    data = json.loads((tiny / "config.json").read_text())
    data |= {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 2}
    assert ModelConfig.from_dict(data).windows == (0, 0, 0)
    data["use_sliding_window"] = True
    assert ModelConfig.from_dict(data).windows == (0, 0, 64)
    data["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    assert ModelConfig.from_dict(data).windows == (64, 0, 64)


@pytest.mark.parametrize(
    ("name", "words"), [("/nowhere/m.gguf", "no such file"), ("a b/c?d", "neither a directory, a .gguf file nor")]
)
def test_names_that_lead_nowhere(name: str, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words) as caught:
        resolve_model(name)
    assert caught.value.name == name


def test_an_unreachable_hub_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub  # noqa: PLC0415 (the module that the loader imports late)

    def unreachable(*args: object, **kwargs: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match=r"someone/some-model: .* no connection"):
        resolve_model("someone/some-model")


def test_a_directory_is_made_once_by_whoever_comes_first(tmp_path: Path) -> None:
    made = []
    barrier = Barrier(4)

    def make(target: Path) -> None:
        made.append(target)
        (target / "file").write_text("whole")

    def ask(_: int) -> str:
        barrier.wait()
        return (directory_made_once(tmp_path / "key", make) / "file").read_text()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["whole"] * 4
    assert len(made) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_failed_or_killed_making_leaves_nothing(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").touch()
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        directory_made_once(tmp_path / "key", fail)
    (tmp_path / ".key.abandoned").mkdir()  # as a kill leaves it
    directory_made_once(tmp_path / "key", lambda target: (target / "file").touch())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_file_is_made_once_by_whoever_comes_first(tmp_path: Path) -> None:
    made = []
    barrier = Barrier(4)
    path = tmp_path / "key"
    (tmp_path / ".key").write_text("what a killed process had made of it")

    def make(file: BinaryIO) -> None:
        made.append(file.name)
        file.write(b"whole")

    def read() -> str | None:
        return path.read_text() if path.is_file() else None

    def ask(_: int) -> str:
        barrier.wait()
        return file_made_once(path, read, make)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["whole"] * 4
    assert len(made) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_file_whose_making_fails_is_not_there(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        file_made_once(tmp_path / "key", lambda: None, fail)
    assert [file.name for file in tmp_path.iterdir()] == ["key.lock"]


def test_weights_are_packed_once_and_anew_where_the_file_is_damaged(
    tiny: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=loader.logger.name)
    model = load_model(ModelSource("tiny", tiny), "bfloat16")
    model.packed()
    assert "packing the weights of tiny" in caplog.text
    (path,) = (file for file in (own_cache / "packed").iterdir() if file.suffix != ".lock")
    whole = path.read_bytes()
    caplog.clear()
    load_model(ModelSource("same files, other name", tiny), "bfloat16").packed()
    assert not caplog.records
    path.write_bytes(whole[:-100])
    model.packed()
    assert "packing" in caplog.text
    assert path.read_bytes() == whole
    load_model(ModelSource("tiny", tiny)).packed()
    assert len(list((own_cache / "packed").iterdir())) == 4  # a file and its lock for each dtype


def test_the_alias_is_converted_once_and_then_needs_no_transformers(caplog: pytest.LogCaptureFixture) -> None:
    directory = models.smollm2_dir()
    with caplog.at_level(logging.INFO, logger=source.logger.name):
        assert resolve_model(source.ALIAS) == ModelSource("smollm2-135m", directory)
    assert not caplog.records
    script = (
        "import sys; from batonq.engine.models import resolve_model, load_model;"
        "load_model(resolve_model('smollm2-135m'));"
        "assert not {'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
