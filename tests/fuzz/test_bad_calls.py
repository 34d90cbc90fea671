"""Ten thousand corrupted calls: each raises a TreeAttnError that names an argument, or returns what the oracle does.

Never another exception, a crash or a silent result. A failure names the seed: ``corrupted(seed)`` is the call.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import treeattn as ta
from treeattn import api
from treeattn.testing import Case, assert_within_budget, canaries, make_case

CALLS, BATCH = 10_000, 500
MASKS = ("full", "causal", "tree", "tree&(window|sink)")
ARGUMENT = re.compile(
    r"^(q|kv|k|v|k, v|pages|page_indptr|page_ids|last_page_len|kv_indptr|q_indptr|q_heads|dtype|mask|trees|parents"
    r"|(ValidLength |PaddedLeft )?lengths|Window|Sink|sm_scale|threads|target|out|out \d|lse \d|merge): .{10,}",
    re.DOTALL,
)
JUNK: list[Any] = [
    None, 3, -1, 1.5, np.nan, 2**70, "x", b"xyz", object(), (), {}, {1: 2}, {3}, [None], ["a", "b"], [[1], [2, 3]],
    [2**70], [1.5], [np.nan], range(3), len, int, np.float32(1), np.array(None, object), np.array([object()] * 3),
    np.array(["abc"]), np.zeros(3, complex), np.zeros(3, bool), np.zeros((2, 2), int), np.zeros((2, 3, 4), int),
    np.zeros((0, 2, 16)), np.array(["2020-01-01"], "datetime64[D]"), np.zeros(2, [("a", int)]), ta.Full(),
    memoryview(b"abcd"), slice(3), 1j, True,
]  # fmt: skip


@dataclass
class Call:
    """The arguments of one call, and which of them was harmed."""

    kind: str
    arguments: dict[str, Any]
    harmed: str = ""
    how: str = ""


# corruptions ------------------------------------------------------------------------------------------------


def harm_integers(rng: np.random.Generator, array: Any) -> Any:
    """An indptr, page ids or lengths, a little or much off."""
    array = np.array(array, np.int64)
    at = int(rng.integers(0, max(len(array), 1)))

    def put(value: int) -> Any:
        changed = array.copy()
        changed[at : at + 1] = value
        return changed

    ways: list[Callable[[], Any]] = [
        lambda: put(int(array[at]) + 1 if len(array) else 1),
        lambda: put(int(array[at]) - 1 if len(array) else 1),
        lambda: put(-1),
        lambda: put(2**20),
        lambda: put(-(2**31)),
        lambda: array + 1,
        lambda: -array,
        lambda: array[::-1],
        lambda: rng.permutation(array),
        lambda: array[:-1],
        lambda: array[1:],
        lambda: array[:0],
        lambda: np.append(array, array[-1:]),
        lambda: np.append(array, [0]),
        lambda: np.repeat(array, 2),
        lambda: array.astype(float),
        lambda: array.astype(complex),
        lambda: array.astype(object),
        lambda: array.astype(bool),
        lambda: array.astype(str),
        lambda: array.astype(np.uint64) if (array >= 0).all() else array * 0,
        lambda: array.astype(np.int8),
        lambda: array.astype(">i4"),
        lambda: array[None],
        lambda: array[:, None],
        lambda: array.tolist(),
        lambda: array.sum(),
        lambda: np.repeat(array, 2)[::2],
        lambda: np.zeros_like(array),
        lambda: rng.integers(-5, 50, len(array)),
        lambda: np.where(array == array[at], 2**62, array) if len(array) else array,
    ]
    return ways[rng.integers(len(ways))]()


@np.errstate(invalid="ignore")
def harm_floats(rng: np.random.Generator, array: np.ndarray) -> Any:
    """q, k, v or pages: another dtype, another shape, other strides, NaN."""
    axis = int(rng.integers(0, array.ndim))

    def with_nan() -> Any:
        changed = array.copy()
        changed.ravel()[rng.integers(0, changed.size)] = np.nan
        return changed

    ways: list[Callable[[], Any]] = [
        *(
            lambda dtype=dtype: array.astype(dtype)
            for dtype in (float, int, np.int8, complex, bool, object, np.longdouble)
        ),
        lambda: array.astype(">f4"),
        lambda: array.astype(str),
        lambda: array[0],
        lambda: array[None],
        lambda: array.ravel(),
        lambda: array[..., 0],
        lambda: np.moveaxis(array, axis, 0),
        lambda: np.take(array, range(array.shape[axis] - 1), axis) if axis < array.ndim - 1 else array,
        lambda: np.concatenate([array, array], axis) if axis < array.ndim - 1 else array,
        lambda: np.take(array, [], axis) if axis < array.ndim - 1 else array,
        lambda: np.asfortranarray(array),
        lambda: np.repeat(array, 2, axis)[
            tuple(slice(None, None, 2) if a == axis else slice(None) for a in range(array.ndim))
        ],
        lambda: np.ascontiguousarray(array[::-1])[::-1],
        lambda: np.broadcast_to(array[:1], array.shape),
        lambda: array.tolist(),
        lambda: np.ma.masked_array(array),
        with_nan,
    ]
    return ways[rng.integers(len(ways))]()


def harm_trees(rng: np.random.Generator, trees: tuple[ta.TokenTree, ...]) -> Any:
    """Another number of trees, of other sizes, with other parents, or no trees."""
    trees = list(trees)
    at = int(rng.integers(0, len(trees)))

    def put(tree: Any) -> Any:
        return [*trees[:at], tree, *trees[at + 1 :]]

    parents = trees[at].parents
    ways: list[Callable[[], Any]] = [
        lambda: trees[:-1],
        lambda: [*trees, trees[0]],
        lambda: trees[::-1],
        lambda: put(ta.TokenTree.chain(int(rng.integers(0, 60)))),
        lambda: put(ta.TokenTree.star(len(parents))),
        lambda: put(JUNK[rng.integers(len(JUNK))]),
        lambda: put(parents),
        lambda: put(ta.TokenTree.from_parents(harm_integers(rng, parents))),
        lambda: put(ta.TokenTree.from_parents(rng.integers(-1, max(len(parents), 1), len(parents)))),
        lambda: put(ta.TokenTree.from_parents(JUNK[rng.integers(len(JUNK))])),
        lambda: trees[0],
        lambda: JUNK[rng.integers(len(JUNK))],
    ]
    return ways[rng.integers(len(ways))]()


def harm_mask(rng: np.random.Generator, case: Case) -> Any:
    """Another mask: of wrong sizes, of junk, joined with junk."""
    junk = JUNK[rng.integers(len(JUNK))]
    lengths = np.maximum(case.kv.kv_len, np.diff(case.q_indptr))
    ways: list[Callable[[], Any]] = [
        lambda: junk,
        lambda: case.mask & junk,
        lambda: case.mask | junk,
        lambda: ta.Tree(harm_trees(rng, case.mask.trees)) if case.mask.trees else ta.Causal(),
        lambda: ta.Tree(harm_trees(rng, case.mask.trees)) if case.mask.trees else ta.Full(),
        lambda: case.mask & ta.Tree(case.mask.trees) if case.mask.trees else ta.Tree(junk),
        lambda: ta.ValidLength(harm_integers(rng, lengths)),
        lambda: ta.ValidLength(junk),
        lambda: (
            ta.Tree(case.mask.trees or [ta.TokenTree.chain(n) for n in np.diff(case.q_indptr)])
            & (ta.Window(junk) | ta.Sink(2))
        ),
        lambda: ta.Window(junk),
        lambda: ta.Sink(junk),
        lambda: ta.Tree,
    ]  # forms of four kernels, and of no other
    return ways[rng.integers(len(ways))]()


# calls ------------------------------------------------------------------------------------------------------


@cache
def base(mask: str, storage: str, seed: int) -> Case:
    lengths = [(2, 9), (0, 4), (1, 18), (0, 0), (3, 3)]
    return make_case(
        np.random.default_rng(seed),
        mask=mask,
        lengths=lengths,
        storage=storage,
        q_heads=2,
        kv_heads=1,
        page_size=4,
        logit_scale=5.0,
    )


def storage_of(kv: Any, **changes: Any) -> Any:
    fields = dict(vars(kv))  # the arrays alone, not what was derived from them
    names = (
        ("pages", "page_indptr", "page_ids", "last_page_len") if isinstance(kv, ta.PagedKV) else ("k", "v", "kv_indptr")
    )
    return type(kv)(**{name: changes.get(name, fields[name]) for name in names})


def corrupted(seed: int) -> tuple[Call, Callable[[], Any]]:
    """The call of a seed, and a function that makes it; making its arguments may raise, too."""
    rng = np.random.default_rng(seed)
    case = base(str(rng.choice(MASKS)), str(rng.choice(["paged", "ragged"])), int(rng.integers(3)))
    arrays = (
        ("pages", "page_indptr", "page_ids", "last_page_len")
        if isinstance(case.kv, ta.PagedKV)
        else ("k", "v", "kv_indptr")
    )
    harmed = str(rng.choice(["q", "kv", "mask", "q_indptr", "sm_scale", "out", "threads", "target", *arrays, *arrays]))
    is_junk = bool(rng.random() < 0.2)
    call = Call(str(rng.choice(["attention", "run"])), {}, harmed, "junk" if is_junk else "harm")

    def make() -> Any:
        junk = JUNK[rng.integers(len(JUNK))]
        arguments = {"q": case.q, "kv": case.kv, "mask": case.mask, "q_indptr": case.q_indptr}
        if harmed in arrays:
            value = getattr(case.kv, harmed)
            changed = junk if is_junk else (harm_floats if value.dtype.kind == "f" else harm_integers)(rng, value)
            arguments["kv"] = storage_of(case.kv, **{harmed: changed})
        elif harmed == "mask":
            arguments["mask"] = junk if is_junk else harm_mask(rng, case)
        elif is_junk or harmed in ("kv", "sm_scale", "threads", "target"):
            arguments[harmed] = junk
        elif harmed == "out":
            arguments["out"] = harm_floats(rng, np.zeros_like(case.q))
        else:
            arguments[harmed] = (harm_floats if harmed == "q" else harm_integers)(rng, arguments[harmed])
        if harmed == "threads" and isinstance(junk, int) and junk > 1000:
            arguments["threads"] = -junk  # its memory is another test's
        call.arguments = arguments
        return run(call, case)

    return call, make


def run(call: Call, case: Case) -> Any:
    arguments = dict(call.arguments)
    if call.kind == "attention":
        return ta.attention(**arguments)
    q, kv, out = arguments.pop("q"), arguments.pop("kv"), arguments.pop("out", None)
    plan = api.plan(case.kv, **arguments, q_heads=2, dtype="float32")
    return plan.run(q, kv, out=out)


def expected_kinds(call: Call) -> bool:
    """Whether the oracle can be asked: arguments it takes, and a table that `Plan.run` reads."""
    return call.kind == "attention" or call.harmed not in (
        "page_indptr",
        "page_ids",
        "last_page_len",
        "kv_indptr",
        "kv",
    )


def fault(seed: int) -> str | None:
    """What is wrong with the outcome of a corrupted call, or None."""
    call, make = corrupted(seed)
    label = f"corrupted({seed}) {call.kind} {call.harmed} {call.how}"
    try:
        out, lse = make()
    except ta.TreeAttnError as error:
        return None if ARGUMENT.match(str(error)) else f"{label}: names no argument: {error}"
    except Exception as error:
        return f"{label}: {type(error).__name__}: {error}"
    if not expected_kinds(call):
        return None
    given = call.arguments
    q = np.asarray(given["q"])
    try:
        scale = None if given.get("sm_scale") is None else float(given["sm_scale"])
        case = Case(
            q.astype(q.dtype.newbyteorder("=")), given["kv"], given["mask"], np.asarray(given["q_indptr"]), scale
        )
        assert_within_budget(out, lse, case)
    except Exception as error:
        return f"{label}: silently wrong, or the oracle refuses: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("begin", range(0, CALLS, BATCH))
def test_corrupted_calls(begin: int) -> None:
    faults = [found for seed in range(begin, begin + BATCH) if (found := fault(seed))]
    assert not faults, f"{len(faults)} of {BATCH} calls:\n" + "\n".join(faults[:12])


@pytest.mark.parametrize("seed", range(200))
def test_nothing_is_written_when_a_call_is_refused(seed: int) -> None:
    """The output keeps every byte, and so does what stands around it."""
    call, make = corrupted(10**6 + seed)
    try:
        make()
    except Exception:  # which one is the other test's
        given = call.arguments
    else:
        return
    if not given or call.harmed == "out":
        return
    buffer = canaries((6, 2, 16), np.float32)
    before = buffer.surroundings.tobytes()
    with contextlib.suppress(Exception):
        run(Call(call.kind, given | {"out": buffer.array}), base("causal", "paged", 0))
    assert buffer.surroundings.tobytes() == before


def test_most_corruptions_are_refused() -> None:
    """The fuzzer is a fuzzer: most calls are bad, and not all."""
    refused = 0
    for seed in range(300):
        try:
            corrupted(seed)[1]()
        except Exception:
            refused += 1
    assert 150 < refused < 290
