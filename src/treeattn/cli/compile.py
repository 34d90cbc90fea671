"""``treeattn compile``: kernels in the language of a target, with all it takes to launch them without Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..ahead.compiled import CompiledKernel


@click.command("compile", short_help="Write kernels for a target, to launch without Python.")
@click.option("--target", required=True, metavar="T", help="llvm, cuda, opencl, webgpu, metal, rocm, or a JSON object.")
@click.option("--spec", "spec_file", type=click.Path(path_type=Path), help="JSON file that describes one kernel.")
@click.option("--hf-config", type=click.Path(path_type=Path), help="config.json of a model: all kernels it needs.")
@click.option("-o", "--out", "folder", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--mask", help="Of a model's kernels, beside its windows; by default tree.")
@click.option("--dtype", help="Of q and the cache of a model; by default its own.")
@click.option("--rotate", is_flag=True, help="A model's keys lie unrotated: kernels apply RoPE.")
@click.option("--rows", type=click.IntRange(min=1), help="Most rows of a sequence, to choose a GPU's tile by.")
@click.option("--force", is_flag=True, help="Write into a folder that holds files; an earlier export there goes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    target: str,
    spec_file: Path | None,
    hf_config: Path | None,
    folder: Path,
    mask: str | None,
    dtype: str | None,
    rotate: bool,
    rows: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Compile attention for a target and write sources, binaries and manifest.json to a folder.

    A spec is a JSON object such as {"d_qk": 128, "q_dtype": "float16", "mask": "tree & (window | sink)"}; its
    other keys are d_v, kv_dtype, rope, softcap, alibi, sink_logits, shared, moved.

    A target may be a JSON object in TVM's form: {"kind": "cuda", "arch": "sm_90a"}.
    """
    from ..ahead.export import check_folder, export

    if (spec_file is None) == (hf_config is None):
        raise click.UsageError("give one of --spec and --hf-config")
    if spec_file is not None and (mask or dtype or rotate):
        raise click.UsageError("--mask, --dtype and --rotate go with --hf-config: a spec says it itself")
    check_folder(folder, force)
    kernels = _kernels(_target(target), spec_file, hf_config, rows, mask=mask or "tree", dtype=dtype, rotate=rotate)
    manifest = export(kernels, folder, force=force)
    click.echo(json.dumps(_report(kernels, manifest)) if as_json else _text(kernels, manifest))


def _target(text: str) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith("{") else text
    except ValueError as error:
        raise click.BadParameter(f"--target: expected a name or a JSON object, got {text!r:.60} ({error})") from None


def _kernels(
    target: Any, spec_file: Path | None, hf_config: Path | None, rows: int | None, **options: Any
) -> list[CompiledKernel]:
    from ..ahead.compiled import compile_spec, kernel_names
    from ..ahead.describe import read_spec, specs_of_model
    from ..hf import spec_from_hf_config
    from ..targets import code_target
    from .terminal import progress

    traits = code_target(target)
    if spec_file is not None:
        return [compile_spec(read_spec(spec_file), traits, rows=rows)]
    specs = specs_of_model(spec_from_hf_config(hf_config), **options)  # type: ignore[arg-type]
    named = zip(kernel_names(specs), specs.items(), strict=True)
    return [
        compile_spec(spec, traits, rows=rows, name=name, layers=layers)
        for name, (spec, layers) in progress(named, len(specs), "compiling")
    ]


def _report(kernels: list[CompiledKernel], manifest: Path) -> dict[str, Any]:
    found = json.loads(manifest.read_text())
    return {
        "manifest": str(manifest),
        "target": found["target"],
        "files": found["files"],
        "kernels": [{"name": kernel.name, "layers": kernel.layers} for kernel in kernels],
    }


def _text(kernels: list[CompiledKernel], manifest: Path) -> str:
    report = _report(kernels, manifest)
    lines = [f"{kernel.name}: {len(kernel.layers)} layers" if kernel.layers else kernel.name for kernel in kernels]
    return "\n".join([*lines, f"{', '.join(report['files'])} and {manifest.name} written to {manifest.parent}"])
