"""`scripts/resources`: every kernel's machine code against the baseline, or into it.

    scripts/resources            compares; exit code 1 and a line a figure when something became worse
    scripts/resources --update   rewrites tests/compile/resources.json

Needs nvcc, no GPU; two minutes on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.compile.resources import BASELINE, Baseline, Resources, write
from tests.triton import aot


def cuda_tilelang() -> tuple[dict[str, Resources], dict[str, str]]:
    """Its kernels' figures, and the compilers."""
    from tests.compile.cuda_kernels import GROUPS
    from tests.compile.cuda_sources import compile_group, versions

    found: dict[str, Resources] = {}
    for name, group in GROUPS.items():
        print(f"cuda_tilelang: {name}", file=sys.stderr)
        with TemporaryDirectory() as folder:
            found |= compile_group(group(), Path(folder))[1].resources
    return found, versions()


def portable_triton() -> tuple[dict[str, Resources], dict[str, str]]:
    """Its kernels' figures, and the compilers.

    Raises:
        RuntimeError: a kernel does not compile.
    """
    print("portable_triton", file=sys.stderr)
    built = aot.compile_all(aot.jobs(aot.MEASURED))
    failed = [f"{result.job}: {result.error}" for result in built if result.error]
    if failed:
        raise RuntimeError("\n".join(failed))
    return aot.resources_of(built), aot.versions()


BACKENDS = {"cuda_tilelang": cuda_tilelang, "portable_triton": portable_triton}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/resources", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help=f"rewrite {BASELINE.name} instead of comparing")
    update = parser.parse_args().update
    if shutil.which("nvcc") is None:
        parser.error("no nvcc on PATH; cuda_tilelang's kernels need the CUDA toolkit (a GPU is not needed)")
    results = {backend: figures() for backend, figures in BACKENDS.items()}
    if update:
        kernels = {f"{backend}/{name}": row for backend, (found, _) in results.items() for name, row in found.items()}
        write(kernels, {backend: compilers for backend, (_, compilers) in results.items()})
        print(f"{len(kernels)} kernels written to {BASELINE}")
        return 0
    failures, baseline = [], Baseline()
    for backend, (found, compilers) in results.items():
        worse, remarks = baseline.compare(backend, found, compilers)
        gone = baseline.keys(backend) - set(found)
        failures += worse + [f"{backend}/{name}: is in the baseline, and no kernel has this name" for name in sorted(gone)]
        print(*remarks, sep="\n", end="\n" if remarks else "")
    print(*failures or ["no kernel became worse"], sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
