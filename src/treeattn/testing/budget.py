"""The error a kernel may have, taken from the data: twice that of plain float32 code and its rounding.

``err(kernel) <= 2 * (err(low-precision reference) + eps(dtype) * max|ref|)``: errors are against float64,
and the low-precision one is the worst of `Case.yardsticks`, or, where the four of them were lucky and the kernel is
over, of `Case.more_yardsticks` too.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..arrays import to_numpy
from .cases import Case


def assert_within_budget(out: Any, lse: Any, case: Case) -> None:
    """Raise ``AssertionError`` unless ``out`` and ``lse`` are, within the budget, attention on ``case``.

    Rows that see nothing must be exactly 0 with an ``lse`` of exactly ``-inf``; NaN may stand only where the
    reference has it.

    Parameters
    ----------
    out : Array
        ``[q_total, q_heads, d_v]``, of the dtype of ``case.q``.
    lse : Array
        ``[q_total, q_heads]`` float32, base 2.
    case : Case
        What was computed.
    """
    out, lse = to_numpy(out, "out"), to_numpy(lse, "lse")
    want_out, want_lse = case.expected
    _assert_kind("out", out, want_out.shape, case.q.dtype)
    _assert_kind("lse", lse, want_lse.shape, np.dtype(np.float32))
    _assert_empty_rows(out, lse, want_lse == -np.inf)
    _assert_close("lse", lse, want_lse, case, 1, "float32")
    _assert_close("out", out, want_out, case, 0, case.q.dtype.name)


def _assert_kind(name: str, got: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if got.shape != shape or got.dtype != dtype:
        raise AssertionError(f"{name}: expected {dtype} {list(shape)}, got {got.dtype} {list(got.shape)}")


def _assert_empty_rows(out: NDArray[Any], lse: NDArray[Any], empty: NDArray[np.bool_]) -> None:
    wrong = np.argwhere((lse == -np.inf) != empty)
    if len(wrong):
        at = tuple(wrong[0].tolist())
        wanted = "-inf, the row sees nothing" if empty[at] else "a number, the row sees keys"
        raise AssertionError(f"lse{list(at)}: expected {wanted}; got {lse[at]} ({len(wrong)} such entries)")
    wrong = np.argwhere(empty[..., None] & (out != 0))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"out{list(at)}: expected 0, the row sees nothing; got {out[at]} ({len(wrong)} such entries)"
        )


def _assert_close(name: str, got: NDArray[Any], want: NDArray[Any], case: Case, part: int, dtype: str) -> None:
    if got.size == 0:
        return
    error = _errors(got, want)
    largest, eps = float(np.abs(want[np.isfinite(want)]).max(initial=0)), float(ml_dtypes.finfo(dtype).eps)
    yard_error = budget = 0.0
    for ways in ("yardsticks", "more_yardsticks"):
        yard_error = max([yard_error, *(float(_errors(yard[part], want).max()) for yard in getattr(case, ways))])
        if not np.isfinite(yard_error):
            raise AssertionError(f"{name}: no budget, plain float32 code has no finite result on this case")
        budget = 2 * (yard_error + eps * largest)
        if (error <= budget).all():
            return
    at = tuple(int(index) for index in np.unravel_index(error.argmax(), error.shape))
    over = int((error > budget).sum())
    raise AssertionError(
        f"{name}{list(at)}: error {error[at]:.3e} is over the budget {budget:.3e} "
        f"= 2 * (yardstick error {yard_error:.3e} + eps({dtype}) {eps:.1e} * max|ref| {largest:.3e}); "
        f"expected {want[at]:.9g}, got {float(got[at]):.9g}; {over} of {error.size} entries over"
    )


def _errors(got: NDArray[Any], want: NDArray[np.float64]) -> NDArray[np.float64]:
    """Absolute differences: 0 where both are the same infinity or both NaN, infinite where only one is."""
    numbers = got.astype(np.float64)
    same = (numbers == want) | (np.isnan(numbers) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(numbers - want))
    return np.where(np.isnan(error), np.inf, error)
