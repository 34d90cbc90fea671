"""Arrays in a device's memory: what stays there, what comes back, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from devices import each_target, missing, on
from helpers import attend, plan_of, rng

import treeattn as ta
from treeattn.arrays import numpy_dtype
from treeattn.devices import DeviceArray
from treeattn.errors import DTypeError, IndexRangeError, ShapeError, UnsupportedError
from treeattn.testing import assert_within_budget, make_case


@each_target
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (0, 4), ()])
def test_upload_and_download(target, dtype, shape):
    device = ta.device(target)
    array = (rng().standard_normal(shape) * 50).astype(numpy_dtype(dtype))
    there = device.upload(array)
    assert (there.shape, there.dtype, there.ndim) == (shape, dtype, len(shape))
    assert np.array_equal(there.numpy(), array)
    for index in range(shape[0] if shape else 0):
        assert np.array_equal(there[index].numpy(), array[index])


@each_target
def test_doubles_are_not_uploaded(target):
    with pytest.raises(DTypeError, match="array: float64 is not offered"):
        ta.device(target).upload(np.ones(3))


@each_target
@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [((2, -3), "float32", IndexRangeError), ((2.5,), "float32", DTypeError), ((2,), "float64", DTypeError)],
)
def test_arrays_of_no_size_or_dtype_are_not_allocated(target, shape, dtype, error):
    with pytest.raises(error, match=r"shape|dtype"):
        ta.device(target).empty(shape, dtype)


@each_target
def test_everything_stays_on_the_device(target):
    case = make_case(rng(), mask="tree")
    device = ta.device(target)
    kv = case.kv.to(device)
    assert kv.to(device) is kv
    plan = plan_of(case, target=device)
    q = device.upload(case.q)
    out, lse = plan.run(q, kv)
    assert out.device is lse.device is device
    assert_within_budget(out.numpy(), lse.numpy(), case)
    given = device.empty(out.shape, "float32")
    assert plan.run(q, kv, out=given)[0] is given
    assert np.array_equal(given.numpy(), out.numpy())
    by_arrays, _ = ta.attention(q, kv, case.mask, **case.options)  # the target is where the arrays are
    assert np.array_equal(by_arrays.numpy(), out.numpy())


@each_target
def test_layers_of_one_pool_in_device_memory(target):
    """A view of a larger pool, and plans that are run once a layer."""
    case = make_case(rng(), mask="causal", storage="ragged")
    device = ta.device(target)
    k, v = (np.stack([np.full_like(part, np.nan), part, -part]) for part in (case.kv.k, case.kv.v))
    k[2], pools = case.kv.k, [device.upload(part) for part in (k, v)]
    del v
    pools[0] = device.upload(k)
    layers = [ta.RaggedKV(pools[0][i], pools[1][i], case.kv.kv_indptr) for i in range(3)]
    plan = plan_of(case, target=target)
    out = [plan.run(case.q, layer)[0] for layer in layers]
    assert_within_budget(out[1], plan.run(case.q, layers[1])[1], case)
    assert np.array_equal(out[2], -out[1])


@each_target
def test_out_and_torch(target):
    case = make_case(rng(), mask="causal")
    want, lse = attend(case, target=target)
    out = np.empty((want.shape[1], *want.shape[::2]), np.float32).transpose(1, 0, 2)
    assert attend(case, target=target, out=out)[0] is out
    assert np.array_equal(out, want)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    result, same = ta.attention(torch.from_numpy(case.q), case.kv, case.mask, **case.options, target=target)
    assert isinstance(result, torch.Tensor)
    assert np.array_equal(result.numpy(), want)
    assert np.array_equal(same.numpy(), lse)


@each_target
def test_bad_arrays_are_refused(target):
    case = make_case(rng(), mask="causal")
    device = ta.device(target)
    plan = plan_of(case, target=target)
    with pytest.raises(ShapeError, match="q: expected shape"):
        plan.run(case.q[1:])
    with pytest.raises(DTypeError, match="q: expected dtype float32"):
        plan.run(case.q.astype(np.float16))
    with pytest.raises(ShapeError, match="out: expected shape"):
        plan.run(case.q, out=np.empty((1, 2, 3), np.float32))
    with pytest.raises(DTypeError, match="out: expected dtype float32"):
        plan.run(case.q, out=np.empty(case.q.shape, np.float16))
    for options in ({"q": device.upload(case.q)}, {"kv": case.kv.to(device)}):
        with pytest.raises(UnsupportedError, match="expected memory on the CPU"):
            plan_of(case, target="llvm").run(options.get("q", case.q), options.get("kv"))


@each_target
@pytest.mark.parametrize("to", ["the device", "llvm"])
def test_keys_and_values_apart_are_refused(target, to):
    """A kernel on the CPU would follow the offset of the other as an address."""
    case, device = make_case(rng(), mask="causal", storage="ragged"), ta.device(target)
    k, v = case.kv.k, case.kv.v
    for apart in ((device.upload(k), v), (k, device.upload(v))):
        with pytest.raises(UnsupportedError, match=r"^v: expected memory where k is, "):
            ta.attention(
                case.q, ta.RaggedKV(*apart, case.kv.kv_indptr), case.mask, q_indptr=case.q_indptr,
                target=device if to == "the device" else to,
            )  # fmt: skip


@pytest.mark.skipif(
    bool(missing("opencl") or missing("webgpu")), reason=f"needs both: {missing('opencl') or missing('webgpu')}"
)
def test_arrays_of_another_device_are_refused():
    case = make_case(rng(), mask="causal")
    q = ta.device("opencl").upload(case.q)
    with pytest.raises(UnsupportedError, match="expected an array of <webgpu device"):
        plan_of(case, target="webgpu").run(q)


@pytest.mark.parametrize("target", ["opencl:99", "webgpu:99", "vulkan", "opencl:x", 7])
def test_unknown_devices_are_refused(target):
    with pytest.raises(UnsupportedError, match="target: "):
        ta.device(target)


@each_target
def test_nothing_to_do(target):
    kv = ta.RaggedKV(np.ones((3, 1, 8), np.float32), np.ones((3, 1, 8), np.float32), [0, 3])
    out, lse = ta.attention(np.ones((0, 1, 8), np.float32), kv, ta.Full(), target=target)
    assert out.shape == (0, 1, 8)
    assert lse.shape == (0, 1)


@pytest.mark.parametrize("target", [on("webgpu")])
def test_offsets_past_32_bits_are_refused_where_there_are_no_64(target, monkeypatch):
    plan = plan_of(make_case(rng(), mask="causal"), target=target)
    monkeypatch.setattr(DeviceArray, "reach", property(lambda self: 2**31))
    with pytest.raises(UnsupportedError, match="whose offsets are 32-bit, got 2147483648"):
        plan.run(make_case(rng(), mask="causal").q)


@pytest.mark.parametrize("target", [on("webgpu")])
def test_more_blocks_than_a_dimension_has(target):
    """65,600 sequences of one row and one key: every output is the value."""
    count = 65600
    k, v = (rng(seed).standard_normal((count, 1, 4), np.float32) for seed in range(2))
    kv = ta.RaggedKV(k, v, np.arange(count + 1))
    out, lse = ta.attention(k, kv, ta.Full(), q_indptr=np.arange(count + 1), target=target)
    assert np.allclose(out, v, rtol=1e-6, atol=0)
    assert np.allclose(lse, (k * k).sum(-1) / 2 * np.log2(np.e), rtol=1e-5, atol=1e-5)
