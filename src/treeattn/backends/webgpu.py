"""WebGPU devices, by wgpu-py: Vulkan, Metal and D3D12 GPUs, and CPUs through lavapipe.

A device is asked for with the default limits of the specification, so kernels that run here run in every browser too;
only the sizes of buffers are the adapter's.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..devices import WORD, Device, DeviceArray, Program, itemsize
from ..errors import CompileError, UnsupportedError
from ..targets import GPUS, GpuTraits

INSTALL = "pip install 'treeattn[webgpu]' (a CPU device on Debian: apt-get install mesa-vulkan-drivers)"
MOST_BLOCKS = 65535  # of one dimension
BLOCKS = 128  # nobody tells the number of compute units
SIZES = ("max-buffer-size", "max-storage-buffer-binding-size")


@lru_cache(maxsize=1)
def devices() -> tuple[Any, ...]:
    """Return wgpu's adapters.

    Raises
    ------
    UnsupportedError
        wgpu is not installed, or there is no adapter.
    """
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Mesa complains on stderr without one
    try:
        import wgpu
    except ImportError as error:
        raise UnsupportedError(f"target: webgpu needs wgpu ({error}); {INSTALL}") from None
    found = tuple(a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] != "OpenGL")
    if not found:
        raise UnsupportedError(f"target: no WebGPU adapter; install your GPU's Vulkan driver, or {INSTALL}")
    return found


@lru_cache(maxsize=8)
def open_device(index: int = 0) -> WebGPUDevice:
    """Return device number ``index``, one of `devices`."""
    return WebGPUDevice(devices()[index])


class WebGPUDevice(Device):
    """A device with its queue."""

    def __init__(self, adapter: Any) -> None:
        import wgpu

        self.usage, self.stage = wgpu.BufferUsage, wgpu.ShaderStage.COMPUTE
        self.name, self.blocks, self.refusal = str(adapter.info["device"]), BLOCKS, wgpu.GPUError
        default = GPUS["webgpu"]
        has_half = "shader-f16" in adapter.features
        self.traits = GpuTraits(
            "webgpu", default.threads, default.shared_bytes, has_half, default.int16, default.index,
            storage_buffers=default.storage_buffers,
        )  # fmt: skip
        limits = {name: adapter.limits[name] for name in SIZES} | {
            "max-storage-buffers-per-shader-stage": default.storage_buffers,
            "max-compute-workgroup-storage-size": default.shared_bytes,
            "max-compute-invocations-per-workgroup": default.threads,
        }
        self.most_bytes = min(limits[name] for name in SIZES)
        features = ["shader-f16"] if has_half else []
        self.device = adapter.request_device_sync(required_features=features, required_limits=limits)

    def _allocate(self, size: int) -> Any:
        if size > self.most_bytes:
            raise UnsupportedError(
                f"array: expected at most {self.most_bytes} bytes, a buffer's limit on {self!r}, got {size}; "
                "use a smaller pool or another target"
            )
        usage = self.usage.STORAGE | self.usage.COPY_SRC | self.usage.COPY_DST
        return self.device.create_buffer(size=size, usage=usage)

    def _write(self, array: DeviceArray, content: NDArray[np.uint8]) -> None:
        self.device.queue.write_buffer(array.buffer, 0, content)

    def download(self, array: DeviceArray) -> NDArray[Any]:
        size = itemsize(array.dtype)
        begin, end = array.offset * size, (array.offset + array.size) * size
        if begin == end:
            return np.empty(array.shape, numpy_dtype(array.dtype))
        skip = begin % WORD
        size = -(-(end - begin + skip) // WORD) * WORD
        content = self.device.queue.read_buffer(array.buffer, begin - skip, size)
        host = np.frombuffer(content, np.uint8)[skip : skip + end - begin]
        result: NDArray[Any] = host.copy().view(numpy_dtype(array.dtype)).reshape(array.shape)
        return result

    def finish(self) -> None:
        self.device.queue.on_submitted_work_done_sync()

    def program(self, source: Any) -> Program:
        layout = self._layout(source)
        try:
            pipeline = self.device.create_compute_pipeline(
                layout=self.device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": self.device.create_shader_module(code=source.text), "entry_point": source.name},
            )
        except self.refusal as error:
            raise CompileError(f"the WebGPU driver of {self.name} refused kernel {source.name}: {error}") from error

        def launch(arguments: Mapping[str, Any], blocks: int) -> None:
            values = [arguments[name] for name in source.scalars]
            uniform = np.array([*values, blocks - 1], np.int32)  # TVM's guard lets the given number of blocks by
            buffers = [arguments[name].buffer for name in source.pointers]
            buffers.append(self.device.create_buffer_with_data(data=uniform, usage=self.usage.UNIFORM))
            entries = [
                {"binding": i, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}}
                for i, buffer in enumerate(buffers)
            ]
            encoder = self.device.create_command_encoder()
            run = encoder.begin_compute_pass()
            run.set_pipeline(pipeline)
            run.set_bind_group(0, self.device.create_bind_group(layout=layout, entries=entries))
            folds = -(-blocks // MOST_BLOCKS)  # TVM's kernels count blocks through x, then z
            run.dispatch_workgroups(-(-blocks // folds), 1, folds)
            run.end()
            self.device.queue.submit([encoder.finish()])

        return launch

    def _layout(self, source: Any) -> Any:
        written = re.findall(r"@binding\((\d+)\) var<storage, read_write>", source.text)
        kinds = ["storage" if str(i) in written else "read-only-storage" for i in range(len(source.pointers))]
        entries = [
            {"binding": i, "visibility": self.stage, "buffer": {"type": kind}}
            for i, kind in enumerate([*kinds, "uniform"])
        ]
        return self.device.create_bind_group_layout(entries=entries)
