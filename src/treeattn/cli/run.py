"""``treeattn run``: attention on the arrays of a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..casefile import Case


@click.command("run", short_help="Attention on the arrays of a file.")
@click.argument("case_file", metavar="CASE.npz|CASE.safetensors", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write out and lse to this .npz or .safetensors file.")
@click.option("--check", is_flag=True, help="Compare with the float64 reference, and expected_* of the file too.")
@click.option("--target", help="Where to run; by default this machine's CPU.")
@click.option("--threads", type=click.IntRange(min=1), help="Number of threads; by default all this process has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *, case_file: Path, out: Path | None, check: bool, target: str | None, threads: int | None, as_json: bool
) -> int:
    """Compute attention on a case file.

    Keys: q, q_indptr; k, v, kv_indptr or pages, page_indptr, page_ids, last_page_len.

    Optional: tree_parents with tree_indptr, causal, window, sink, sm_scale, expected_out, expected_lse.
    Exit status 1 where --check finds a difference over the budget.
    """
    from ..casefile import load_case, save_output

    case = load_case(case_file)
    if case.ignored:
        click.echo(f"{case_file}: ignored {', '.join(case.ignored)} (not among the keys of a case file)", err=True)
    result, lse, seconds = _attend(case, target, threads)
    if out is not None:
        save_output(out, result, lse)
    report = _describe(case) | {"seconds": seconds, "out": str(out) if out else None}
    if check:
        report["difference"] = _check(case, result, lse)
    click.echo(json.dumps(report) if as_json else _text(report))
    return 1 if report.get("difference") else 0


def _attend(case: Case, target: str | None, threads: int | None) -> tuple[Any, Any, float]:
    import treeattn

    plan = treeattn.plan(
        case.kv,
        case.mask,
        q_indptr=case.q_indptr,
        q_heads=case.q.shape[1],
        dtype=case.q.dtype.name,
        threads=threads,
        target=target,
        sm_scale=case.sm_scale,
    )
    start = time.perf_counter()
    out, lse = plan.run(case.q, case.kv)
    return out, lse, time.perf_counter() - start


def _describe(case: Case) -> dict[str, Any]:
    page_size = case.kv.table.page_size
    return {
        "sequences": case.kv.num_seqs,
        "rows": len(case.q),
        "keys": int(case.kv.kv_len.sum(dtype="int64")),
        "q_heads": case.q.shape[1],
        "kv_heads": case.kv.kv_heads,
        "d_qk": case.q.shape[2],
        "d_v": case.kv.pools.d_v,
        "q_dtype": case.q.dtype.name,
        "kv_dtype": case.kv.dtype,
        "page_size": None if hasattr(case.kv, "kv_indptr") else page_size,
        "mask": [type(leaf).__name__ for leaf in case.mask.leaves()],
    }


def _check(case: Case, out: Any, lse: Any) -> str | None:
    """Compare with the reference, what the file expects too; the first difference over the budget, if any."""
    from ..bench.check import pieces
    from ..testing import Case as TestCase
    from .terminal import progress

    whole = TestCase(case.q, case.kv, case.mask, case.q_indptr, case.sm_scale)
    results = {"": (out, lse)}
    if case.expected_out is not None or case.expected_lse is not None:
        expected_out = out if case.expected_out is None else case.expected_out.astype(out.dtype)
        expected_lse = lse if case.expected_lse is None else case.expected_lse.astype(lse.dtype)
        results["expected_out and expected_lse of the file: "] = expected_out, expected_lse
    seqs, heads = range(case.kv.num_seqs), range(case.q.shape[1])
    total = sum(len(heads) for begin, end in zip(case.q_indptr[:-1], case.q_indptr[1:], strict=True) if end > begin)
    for piece in progress(pieces(whole, seqs, heads), total, "checking"):
        for name, (got_out, got_lse) in results.items():
            try:
                piece.compare(got_out, got_lse)
            except AssertionError as error:
                return f"{name}{error}"
    return None


def _text(report: dict[str, Any]) -> str:
    layout = f"pages of {report['page_size']}" if report["page_size"] else "ragged"
    lines = [
        "{rows} rows, {sequences} sequences, {keys} keys".format(**report),
        "{q_heads}/{kv_heads} heads, d {d_qk}/{d_v}, {q_dtype} on {kv_dtype}, ".format(**report) + layout,
        f"mask {' '.join(report['mask'])}",
        f"{report['seconds'] * 1e3:.2f} ms, the first call",
    ]
    if report["out"]:
        lines.append(f"out and lse written to {report['out']}")
    if "difference" in report:
        lines.append(
            f"DIFFERS: {report['difference']}" if report["difference"] else "within the budget of the reference"
        )
    return "\n".join(lines)
