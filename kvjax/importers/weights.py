"""Fill a model with named tensors, whatever file they come from.

A family is a table of names (`TensorNames`), a file is shapes and a reader (`Tensors`). Stored
matrices are [out, in]; ours are [in..., out...] with heads as dims of their own, so one rule holds
for all: transpose, then reshape. Biases and norms are reshaped, the embedding is as stored.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..config import ModelConfig
from ..errors import KvjaxError, choose
from ..model import Model
from ..tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")

_OUTPUT_KERNEL = ("attention", "o_kernel")  # [heads, head_dim, model]: two input dims


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """What a family of files calls the parameters."""

    embedding: str
    final_norm: str
    head: str
    block: Mapping[str, str]  # parameter of a block → name, with {} for the number of the layer
    ignored: str  # a regular expression: tensors that follow from the configuration

    def ignores(self, name: str) -> bool:
        return re.fullmatch(self.ignored, name) is not None


@dataclasses.dataclass(frozen=True)
class Tensors:
    """What is stored in a file or in several."""

    where: str  # for messages
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that a source holds; nothing big is read yet."""

    config: ModelConfig
    names: TensorNames
    tensors: Tensors
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class _Target:
    """One parameter and the tensors that fill it."""

    param: nnx.Param
    sources: tuple[str, ...]  # one, or one for each row of a stack of layers
    stored: tuple[int, ...]  # shape of each source
    transpose: bool = False
    stacked: bool = False

    def value(self, tensors: Tensors) -> jax.Array:
        shape, dtype = self.param.shape, np.dtype(self.param.dtype)
        filled = np.empty(shape, dtype)
        rows = filled if self.stacked else filled[None]
        with np.errstate(over="ignore"):  # looked at below, once for all rows
            for row, name in zip(rows, self.sources, strict=True):
                tensor = tensors.read(name)
                row[...] = (tensor.T if self.transpose else tensor).reshape(row.shape)
        if dtype == np.float16 and not np.isfinite(filled).all():
            raise KvjaxError(
                f"{tensors.where}: tensor {self.sources[0]} or its like in another layer exceeds "
                "the range of float16: load with dtype bfloat16 or float32"
            )
        return jnp.asarray(filled)


def fill(checkpoint: Checkpoint, *, dtype: Any) -> Model:
    """A model with the parameters of a checkpoint.

    All names and shapes are compared before anything is read. Beside the model, at most one
    parameter of one stack of layers is in memory.

    Raises:
      KvjaxError: a tensor is missing, has another shape, or has no place in the model.
    """
    config, names, tensors = checkpoint.config, checkpoint.names, checkpoint.tensors
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name  # jnp.float32 will do
    wanted = jnp.dtype(choose("dtype", name, DTYPES))
    model = jax.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0), dtype=wanted))
    targets = _targets(config, names, model)
    _check(config, names, tensors, targets)
    for target in targets:
        target.param.set_value(target.value(tensors))
    return model


def _targets(config: ModelConfig, names: TensorNames, model: Model) -> list[_Target]:
    (vocab, width) = model.embedding.shape
    targets = [
        _Target(model.embedding, (names.embedding,), (vocab, width)),
        _Target(model.final_norm.scale, (names.final_norm,), (width,)),
    ]
    if model.head is not None:
        targets.append(_Target(model.head, (names.head,), (vocab, width), transpose=True))
    for number, block in enumerate(model.stacks):
        layers = [i for i, (stack, _) in enumerate(config.placement) if stack == number]
        for path, param in _params(block):
            name = names.block[".".join(path)]
            sources = tuple(name.format(layer) for layer in layers)
            targets.append(_Target(param, sources, *_stored(path, param.shape[1:]), stacked=True))
    return targets


def _params(block: nnx.Module) -> list[tuple[tuple[str, ...], Any]]:
    """Paths and parameters of a block; the parameters are those of the block, not copies."""
    return [
        (tuple(str(part) for part in path), node)
        for path, node in nnx.iter_graph(block)
        if isinstance(node, nnx.Param)
    ]


def _stored(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Shape of the tensor in the file, and whether it is to be transposed."""
    if path[-1].endswith("bias") or path[-1] == "scale":
        return (math.prod(shape),), False
    inputs = 2 if path == _OUTPUT_KERNEL else 1
    return (math.prod(shape[inputs:]), math.prod(shape[:inputs])), True


def _check(config: ModelConfig, names: TensorNames, tensors: Tensors, targets: list[_Target]):
    """Raise for the first tensor that does not fit."""
    wanted = {name: target.stored for target in targets for name in target.sources}
    missing = [name for name in wanted if name not in tensors.shapes]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise KvjaxError(
            f"{tensors.where}: no tensor {missing[0]}{more}: "
            "expected all that the configuration calls for; copy or download the model again"
        )
    for name, shape in wanted.items():
        if tensors.shapes[name] != shape:
            raise KvjaxError(
                f"{tensors.where}: tensor {name} has shape {list(tensors.shapes[name])}: "
                f"expected {list(shape)} from the configuration"
            )
    extra = [name for name in tensors.shapes if name not in wanted and not names.ignores(name)]
    if config.tie_embeddings and names.head in extra:
        extra.remove(names.head)
        _check_tied(names, tensors)
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise KvjaxError(
            f"{tensors.where}: unexpected tensor {extra[0]}{more}: the model computes something "
            "that kvjax does not, or its configuration is another model's"
        )


def _check_tied(names: TensorNames, tensors: Tensors):
    """Some files store a tied head a second time; another head must not be dropped."""
    if not np.array_equal(tensors.read(names.head), tensors.read(names.embedding)):
        raise KvjaxError(
            f"{tensors.where}: the embeddings are tied, but tensor {names.head} differs from "
            f"{names.embedding}: set tie_word_embeddings to false in config.json"
        )
