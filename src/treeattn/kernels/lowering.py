"""The passes our CPU functions need, and no more: TVM's default sequence takes ten times as long on them."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.tirx import transform

PIPELINE = "treeattn.cpu"


def _pipeline() -> tuple[Any, Any, Any]:
    @tvm.transform.module_pass(opt_level=0)  # type: ignore[untyped-decorator]
    def lower(module: Any, _: Any) -> Any:
        return tvm.ir.transform.Sequential(
            [
                transform.FlattenBuffer(),
                transform.NarrowDataType(32),
                transform.VectorizeLoop(True),
                transform.UnrollLoop(),
                transform.StmtSimplify(),
                transform.AnnotateEntryFunc(),
                transform.SplitHostDevice(),
                transform.MakePackedAPI(),
            ]
        )(module)

    def finish_host() -> Any:
        return tvm.ir.transform.Sequential([transform.LowerTVMBuiltin(), transform.LowerIntrin()])

    def finish_device() -> Any:
        return tvm.ir.transform.Sequential([transform.LowerIntrin()])

    return lower, finish_host, finish_device


tvm.tirx.register_tir_pipeline(PIPELINE, _pipeline)
