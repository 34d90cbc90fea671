"""Matrix products by our own kernel: weights in panels, one thread pool for a whole model."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import to_numpy
from .compiler import product
from .errors import DTypeError, ShapeError
from .targets import available_threads

Float32Array = NDArray[np.float32]


class PackedWeight:
    """A weight kept as the kernel reads it; ``weight(x)`` is ``x @ weight.T``.

    A row of the result depends on its row of ``x`` alone, bit for bit, whatever other rows are computed with it.

    Parameters
    ----------
    weight : float32 ``[outputs, inputs]``
        Copied.
    threads : int, optional
        Threads to use; the processors of the affinity mask by default.
    """

    def __init__(self, weight: Float32Array, threads: int | None = None) -> None:
        weight = to_numpy(weight, "weight")
        if weight.ndim != 2 or weight.dtype != np.float32:
            raise DTypeError(f"weight: expected float32 [outputs, inputs], got {weight.dtype} {list(weight.shape)}")
        self.shape = weight.shape
        self._kernel, config = product()
        self._threads = threads or available_threads()
        outputs, inputs = weight.shape
        num_panels = -(-outputs // config.panel)
        self._panels = np.zeros((num_panels, inputs, config.panel), np.float32)
        whole = outputs // config.panel
        cut = whole * config.panel
        self._panels[:whole] = weight[:cut].reshape(whole, config.panel, inputs).swapaxes(1, 2)
        self._panels[whole:, :, : outputs - cut] = weight[cut:].T
        self._pointer = _pointer(self._panels)

    def __call__(self, x: Float32Array) -> Float32Array:
        """Return ``x @ weight.T``, float32 ``[n, outputs]``, for ``x`` of float32 ``[n, inputs]``."""
        outputs, inputs = self.shape
        if x.ndim != 2 or x.shape[1] != inputs or x.dtype != np.float32:
            raise ShapeError(f"x: expected float32 [n, {inputs}], got {x.dtype} {list(x.shape)}")
        if x.strides[1] != x.itemsize:
            x = np.ascontiguousarray(x)
        num_panels, _, panel = self._panels.shape
        out = np.empty((len(x), num_panels * panel), np.float32)
        if out.size:
            self._kernel(
                _pointer(x), self._pointer, _pointer(out), self._threads, len(x), inputs, num_panels,
                x.strides[0] // 4, num_panels * panel,
            )  # fmt: skip
        return out[:, :outputs]

    def rows(self, outputs: NDArray[np.int32]) -> Float32Array:
        """Return rows of the weight, ``[n, inputs]``."""
        panel, place = np.divmod(outputs, self._panels.shape[2])
        return self._panels[panel, :, place]


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.__array_interface__["data"][0])
