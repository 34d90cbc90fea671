"""Where the parts of a thread's scratch memory lie, in floats: pure arithmetic, shared by kernels and callers."""

from __future__ import annotations

from .spec import KernelSpec, Sizes

LINE_FLOATS = 16

Layout = dict[str, tuple[int, int]]
"""``{name: (offset, size)}``."""


def many_rows(spec: KernelSpec, config: Sizes) -> Layout:
    """Lay out the scratch of `rows_many`."""
    return _lay_out({
        "scores": config.columns * config.panel,
        "seen": config.columns * config.panel,
        "keys": config.columns * spec.d_qk,
        "values": 0 if spec.values_are_keys else config.columns * spec.d_v,
        "queries": config.rows * spec.d_qk,
        "sums": config.rows * spec.d_v,
        "maximum": config.rows,
        "denominator": config.rows,
        "positions": config.rows,
        "slopes": config.rows,
        "strip": 8 * max(spec.d_qk, spec.d_v),
    })  # fmt: skip


def few_rows(spec: KernelSpec, config: Sizes) -> Layout:
    """Lay out the scratch of `rows_few`."""
    return _lay_out({
        "scores": 8 * config.few_columns,
        "seen": 8 * config.few_columns,
        "queries": 8 * spec.d_qk,
        "keys": 32 * spec.d_qk,
        "sums": 8 * spec.d_v,
        "maximum": 8,
        "denominator": 8,
        "factor": 8,
        "positions": 8,
        "slopes": 8,
        "columns_at": config.few_columns,
    })  # fmt: skip


def workspace_floats(spec: KernelSpec, config: Sizes) -> int:
    """Return the floats of scratch memory a thread needs."""
    layouts = [few_rows(spec, config), *([many_rows(spec, config)] if config.has_many else [])]
    return max(_padded(offset + size) for layout in layouts for offset, size in layout.values())


def _lay_out(sizes: dict[str, int]) -> Layout:
    layout, offset = {}, 0
    for name, size in sizes.items():
        layout[name] = (offset, size)
        offset += _padded(size)
    return layout


def _padded(size: int) -> int:
    return -(-size // LINE_FLOATS) * LINE_FLOATS
