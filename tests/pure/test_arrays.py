"""Arrays of other libraries as `treeattn.arrays` sees them: the right numbers, or an error; never foreign memory."""

from __future__ import annotations

import ctypes
import warnings

import numpy as np
import pytest

from treeattn.arrays import indices, to_numpy, view
from treeattn.errors import DTypeError, UnsupportedError

NUMBERS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def held(seen):
    """What lies where a view points to."""
    count = 1 + sum(step * (size - 1) for step, size in zip(seen.strides, seen.shape, strict=True))
    memory = np.ctypeslib.as_array(ctypes.cast(seen.pointer, ctypes.POINTER(ctypes.c_float)), (count,))
    return np.lib.stride_tricks.as_strided(memory, seen.shape, [4 * step for step in seen.strides])


def tensors(torch):
    """Tensors of one content that lie in memory in every way, and of types of their own."""

    class Own(torch.Tensor):
        pass

    plain = torch.from_numpy(NUMBERS.copy())
    negated = torch.complex(plain, -plain).conj().imag
    return {
        "plain": plain,
        "gradient": plain.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(plain.clone()),
        "own type": plain.clone().requires_grad_().as_subclass(Own),
        "gaps": plain.repeat_interleave(2, -1)[..., ::2],
        "turned": plain.transpose(0, 2).contiguous().transpose(0, 2),
        "negated, with gaps": negated,
        "negated": torch._neg_view(-plain),
    }


def test_tensors_of_every_kind():
    torch = pytest.importorskip("torch")
    for name, tensor in tensors(torch).items():
        assert np.array_equal(held(view(tensor, "q")), NUMBERS), name
        assert np.array_equal(to_numpy(tensor, "q"), NUMBERS), name


def without_memory(torch):
    """Tensors that have no memory here, or not as a dense array."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = torch.from_numpy(NUMBERS.copy())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(plain)
    return {
        "meta": plain.to("meta"),
        "fake": fake,
        "sparse": plain.to_sparse(),
        "nested": torch.nested.nested_tensor(list(plain)),
    }


def test_tensors_without_memory_are_refused():
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of nested and of fake tensors
        for name, tensor in without_memory(torch).items():
            for look in (view, to_numpy, indices):
                with pytest.raises(UnsupportedError, match=r"^q: expected a (dense )?tensor"):
                    look(tensor, "q")
                    pytest.fail(name)


def test_tensors_inside_transforms_are_refused():
    torch = pytest.importorskip("torch")
    plain = torch.from_numpy(NUMBERS.copy())
    for look in (view, to_numpy):
        for run in (torch.vmap(lambda x, look=look: look(x, "q")), torch.func.grad(lambda x, look=look: look(x, "q"))):
            with pytest.raises(UnsupportedError, match=r"^q: expected a tensor with memory"):
                run(plain)


class Exporter:
    """An array that only speaks DLPack, and may do it badly."""

    def __init__(self, capsule=None, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **options):
        return self.capsule(**options) if callable(self.capsule) else self.capsule

    def __dlpack_device__(self):
        return self.device() if callable(self.device) else self.device


class Silent:
    __dlpack__ = Exporter.__dlpack__
    capsule = None


def broken():
    raise ZeroDivisionError("in the exporter")


def test_what_exports_well_is_read():
    good = Exporter(NUMBERS.__dlpack__)
    assert np.array_equal(held(view(good, "q")), NUMBERS)
    assert np.array_equal(to_numpy(good, "q"), NUMBERS)


@pytest.mark.parametrize(
    "bad",
    [
        Exporter(lambda **options: broken()),
        Exporter(5),
        Exporter(NUMBERS.__dlpack__, None),
        Exporter(NUMBERS.__dlpack__, ("cpu", 0)),
        Exporter(NUMBERS.__dlpack__, broken),
        Silent(),
    ],
    ids=range(6),
)
def test_what_exports_badly_is_refused(bad):
    for look in (view, to_numpy, indices):
        with pytest.raises(DTypeError, match=r"^q: cannot "):
            look(bad, "q")


def test_memory_elsewhere_is_refused():
    with pytest.raises(UnsupportedError, match=r"^q: expected memory on the CPU, got DLPack device \(8, 0\)"):
        view(Exporter(NUMBERS.__dlpack__, (8, 0)), "q")
