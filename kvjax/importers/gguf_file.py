"""A GGUF file through the gguf package; what it means to a model is `kvjax.importers.gguf`."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..errors import KvjaxError


class _Reader(gguf.GGUFReader):
    """The reader of the package, over a plain array.

    It slices `data` several times for each token and merge, and a slice of a memory map takes
    three times as long as one of an array: 2.5 s or 0.9 s for a vocabulary of 49k tokens.
    """

    @property
    def data(self) -> np.ndarray:
        return self._array

    @data.setter
    def data(self, mapped: np.ndarray):
        self._array = np.asarray(mapped)  # the same mapping: only what is read is brought in


class GGUFFile:
    """An open GGUF file.

    Attributes:
      path: for messages.
      fields: metadata by full name, as plain Python values.
      shapes: of the tensors by name, row-major as in numpy.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        _check_start(self.path)
        try:
            reader = _Reader(self.path)
            self.fields: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
        except Exception as error:  # the library raises no narrower type
            raise _unreadable(self.path, error) from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        # The file lists the fastest dim first.
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(tensor.shape[::-1].tolist()) for name, tensor in self._tensors.items()
        }

    def dequantize(self, name: str) -> np.ndarray:
        """The values of a tensor, whatever its type, in float32."""
        tensor = self._tensors[name]
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise KvjaxError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which the gguf "
                "package cannot dequantise: quantise the model to another type, such as Q8_0"
            ) from None


def _check_start(path: Path):
    """Raise for other files, and for those in the other byte order.

    The library reads the latter, but dequantises their blocks as if they were in ours.
    """
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), file.read(4)
    except OSError as error:
        raise KvjaxError(f"{path}: cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise KvjaxError(f"{path}: not a GGUF file: expected it to begin with 'GGUF'")
    number, known = int.from_bytes(version, "little"), gguf.READER_SUPPORTED_VERSIONS
    if len(version) == 4 and number not in known:
        raise KvjaxError(
            f"{path}: GGUF version {number}: expected {' or '.join(map(str, known))}, "
            "little-endian; convert the model anew with llama.cpp"
        )


def _unreadable(path: Path, error: Exception) -> KvjaxError:
    if "GGMLQuantizationType" in str(error):
        return KvjaxError(
            f"{path}: a tensor has an unknown type ({error}): update the gguf package"
        )
    return KvjaxError(
        f"{path}: the file ends at byte {path.stat().st_size} and cannot be read ({error!r:.120}): "
        "it is truncated or damaged; copy or download it again"
    )
