"""One layer of a plan on a GPU: its arrays in the device's memory, its work uploaded once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import INT32_MAX, View, as_kind, view
from .compiler import GpuKernel
from .devices import Device, DeviceArray
from .errors import ShapeError, UnsupportedError
from .kernels.spec import KernelSpec
from .launch import LOG2_E, LayerCheck, angles
from .logits import LogitParts
from .schedules.gpu import explain
from .storage import Pools, Storage, check_storage

if TYPE_CHECKING:
    from .device_work import DeviceWork

STATE_FIELDS = 2  # of a row's partial state, after its sums


@dataclass
class DeviceLaunch(LayerCheck):
    """The compiled kernels of a spec with the constants of a plan."""

    kernel: GpuKernel
    device: Device
    storage: Storage
    work: DeviceWork
    parts: LogitParts
    q_total: int
    q_heads: int
    sm_scale: float

    def __post_init__(self) -> None:
        self.pools = self.storage.pools
        self.q_dtype = self.spec.q_dtype
        self.lock = threading.Lock()
        self.uploaded = False

    @property
    def spec(self) -> KernelSpec:
        return self.kernel.spec

    @property
    def num_items(self) -> int:
        return self.work.num_items

    @property
    def threads(self) -> int:
        """Blocks that run the items: one each."""
        return self.work.num_items

    @property
    def template(self) -> str:
        """Which kernel template runs, and why not another one."""
        return explain(self.spec, self.kernel.tile, self.kernel.traits)

    def run(self, q: Any, kv: Storage | None, out: Any, check: bool) -> tuple[Any, Any]:
        """Launch with the arrays of one layer: those of the host are uploaded, and their result comes back."""
        if kv is not None:
            check_storage(kv)
        storage = self.storage if kv is None else kv
        queries, pools = view(q, "q"), storage.pools
        if check:
            self.check_layer(queries, pools)
        shape = (self.q_total, self.q_heads, pools.d_v)
        if queries.device not in (None, self.device):
            raise UnsupportedError(f"q: expected an array of {self.device!r}, got one of {queries.device!r}")
        if out is not None:
            self._check_out(view(out, "out"), shape, queries.device)
        pools = storage.to(self.device).pools
        if queries.device is not None:
            result = self.device.empty_like(q, shape, self.q_dtype) if out is None else out
            lse = self.device.empty_like(q, shape[:2], "float32")
            self._call(queries, pools, view(result, "out"), view(lse, "lse"))
            return result, lse
        result, lse = self.device.empty(shape, self.q_dtype), self.device.empty(shape[:2], "float32")
        self._call(view(self.device.upload(q), "q"), pools, view(result, "out"), view(lse, "lse"))
        host = self.device.download(result)
        if out is None:
            return as_kind(host, q), as_kind(self.device.download(lse), q)
        out[...] = as_kind(host, q)
        return out, as_kind(self.device.download(lse), q)

    def _call(self, q: View, pools: Pools, out: View, lse: View) -> None:
        if self.work.num_items == 0:
            return
        arrays = {"q": q, "k": pools.k, "v": pools.v, "out": out}
        strides = {
            "q": dict(zip(("token", "head"), q.strides, strict=False)),
            "out": dict(zip(("token", "head"), out.strides, strict=False)),
            "k": dict(zip(("page", "slot", "head"), pools.k_strides, strict=True)),
            "v": dict(zip(("page", "slot", "head"), pools.v_strides, strict=True)),
        }
        arguments: dict[str, Any] = {"lse": lse.owner}
        for name, array in arrays.items():
            self._check_index(name, array)
            arguments[name], arguments[f"{name}_at"] = array.owner, array.pointer
            arguments |= {f"{name}_{step}": stride for step, stride in strides[name].items()}
        with self.lock:  # partial states of one run are merged before those of the next are written
            arguments |= self._own()
            arguments["num_blocks"] = self.work.num_items
            self.kernel.attention(arguments, self.work.num_items)
            if self.work.num_merges:
                self.kernel.merge(arguments, self.work.num_merges)

    def _own(self) -> dict[str, DeviceArray]:
        """Return the plan's own buffers, uploaded at the first run."""
        if not self.uploaded:
            plan, tables = self.work.pack(self._tables(), self._constants())
            states = self.work.num_states * self.kernel.tile.rows * (self.spec.d_v + STATE_FIELDS)
            self.buffers = {
                "plan": self.device.upload(plan),
                "tables": self.device.upload(tables),
                "partial": self.device.empty((states,), "float32"),
            }
            self.uploaded = True
        return self.buffers

    def _tables(self) -> dict[str, Any]:
        tables: dict[str, Any] = {}
        if self.parts.rope is not None:
            tables["rope_low"], tables["rope_high"] = angles(self.parts.rope, self.pools.d_qk, self.work.last_position)
        if self.parts.alibi is not None:
            tables["alibi"] = self.parts.alibi
        if self.parts.sink_logits is not None:
            tables["sink_logits"] = self.parts.sink_logits
        return tables

    def _constants(self) -> dict[str, float]:
        cap = (self.parts.softcap or 1.0) * LOG2_E
        return {"sm_scale": self.sm_scale, "cap_limit": cap, "cap_inverse": 1 / cap, "minus_infinity": -np.inf}

    def _check_index(self, name: str, array: View) -> None:
        if self.kernel.traits.index == "int32" and array.owner.reach > INT32_MAX:
            raise UnsupportedError(
                f"{name}: expected at most {INT32_MAX} elements on {self.device!r}, whose offsets are 32-bit, "
                f"got {array.owner.reach}; use smaller pools or another target"
            )

    def _check_out(self, out: View, shape: tuple[int, ...], place: Device | None) -> None:
        if out.shape != shape:
            raise ShapeError(f"out: expected shape {list(shape)}, got {list(out.shape)}")
        if out.device is not place:
            raise UnsupportedError(f"out: expected memory where q is, got {out.device or 'the host'}")
        self.check_out_dtype(out)
