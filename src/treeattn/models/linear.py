"""Matrix products, the one seam between a model and what multiplies.

``"treeattn"`` is `treeattn.products.PackedWeight`: rows do not depend on each other, so a token verified in a tree is
the token decoded alone, and attention and products share one thread pool. ``"numpy"`` and ``"torch"`` are there to
compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..products import PackedWeight
from .packages import require

Float32Array = NDArray[np.float32]


class Weight(Protocol):
    """A matrix ``[outputs, inputs]`` in the layout its library multiplies fastest."""

    def __call__(self, x: Float32Array) -> Float32Array:
        """Return ``x @ weight.T``, ``[n, outputs]``: a new array that the caller may change."""
        ...

    def rows(self, outputs: NDArray[np.int32]) -> Float32Array:
        """Return rows of the weight, ``[n, inputs]``: embeddings, where they are tied to the output product."""
        ...


class NumpyWeight:
    """``[inputs, outputs]``, the order that the BLAS of NumPy's wheels reads faster."""

    def __init__(self, weight: Float32Array) -> None:
        self._transposed = np.ascontiguousarray(weight.T)

    def __call__(self, x: Float32Array) -> Float32Array:
        y: Float32Array = x @ self._transposed
        return y

    def rows(self, outputs: NDArray[np.int32]) -> Float32Array:
        return np.ascontiguousarray(self._transposed[:, outputs].T)


class TorchWeight:
    """``[outputs, inputs]``, as PyTorch's own layers keep it."""

    def __init__(self, weight: Float32Array) -> None:
        self._torch: Any = require("torch", "linear='torch'")
        self._weight = np.ascontiguousarray(weight)
        self._tensor = self._torch.from_numpy(self._weight)

    def __call__(self, x: Float32Array) -> Float32Array:
        with self._torch.inference_mode():
            y: Float32Array = self._torch.nn.functional.linear(self._torch.from_numpy(x), self._tensor).numpy()
        return y

    def rows(self, outputs: NDArray[np.int32]) -> Float32Array:
        return self._weight[outputs]


LIBRARIES: dict[str, Callable[[Float32Array], Weight]] = {
    "treeattn": PackedWeight,
    "numpy": NumpyWeight,
    "torch": TorchWeight,
}


class Linear:
    """``x -> x @ weight.T + bias``."""

    def __init__(self, weight: Weight, bias: Float32Array | None) -> None:
        self.weight, self._bias = weight, bias

    def __call__(self, x: Float32Array) -> Float32Array:
        y = self.weight(x)
        if self._bias is not None:
            y += self._bias
        return y


def library(name: str) -> Callable[[Float32Array], Weight]:
    """Return what packs a weight for the library of that name.

    Raises
    ------
    UnsupportedError
        A name that is not in `LIBRARIES`.
    """
    if not isinstance(name, str) or name not in LIBRARIES:
        raise UnsupportedError(f"linear: expected one of {', '.join(LIBRARIES)}, got {name!r}")
    return LIBRARIES[name]
