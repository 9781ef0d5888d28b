"""Every kernel compiles ahead of time for every target, without a device; and few variants of each are ever compiled."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict

import pytest
import torch

from kvhal.platform import Platform
from tests.compile.resources import Baseline
from tests.triton.aot import MEASURED, TARGETS, Built, Job, compile_all, count_variants, jobs, resources_of, versions

pytest.importorskip("triton")

ORDINARY = 4  #: variants of an operation when rows lie as frameworks allocate them: int32 and int64 slots, few tokens and many
ANY = 24  #: variants of an operation over all alignments of rows, both types of slots, few tokens and many


def chosen(arch: str) -> list[Job]:
    """All jobs where the project's numbers come from; elsewhere one of each kernel and codec, to bound the time."""
    if arch == MEASURED:
        return jobs(arch)
    formats = {"V41_FORMAT", "V41_FP4_FORMAT", "FP8_FLOAT32_SF_INDEX_KV_FORMAT", "BF16_FORMAT", None}
    return [job for job in jobs(arch) if job.format in formats and job.variant in ("", "few", "norm-rope", "norm-rope-few")]


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_compiles(arch: str, record_property: pytest.RecordProperty) -> None:
    built = compile_all(chosen(arch))
    for result in built:
        print(f"{result.job}: {result.size} bytes in {result.seconds:.1f} s {result.error}")
    record_property("compiled", " ".join(str(result.job) for result in built))
    assert [f"{result.job}: {result.error}" for result in built if result.error] == []
    assert all(result.size for result in built)
    if arch == MEASURED:
        _check_resources(built)


def _check_resources(built: list[Built]) -> None:
    """Vector widths, spills and registers are the baseline's; and a narrowed store would have been noticed."""
    found = resources_of(built)
    baseline = Baseline()
    failures, remarks = baseline.compare("portable_triton", found, versions())
    for remark in remarks:
        warnings.warn(remark, stacklevel=1)
    assert not failures, "\n".join(failures)
    narrow = {"store_kv_cache-V41_FORMAT": found["store_kv_cache-V41_FORMAT-misaligned"]}
    failures, _ = baseline.compare("portable_triton", narrow, versions())
    assert any(re.search(r"V41_FORMAT +load +16 -> \d +worse", line) for line in failures), failures


def test_every_kernel_has_a_baseline_and_every_baseline_a_kernel() -> None:
    assert Baseline().keys("portable_triton") == {job.kernel for job in jobs(MEASURED)}


def test_few_tokens_and_many_have_kernels_of_their_own() -> None:
    """Else their names in the baseline would stand for one kernel, and the other would be held to nothing."""
    kernels = Baseline().kernels
    few = [name for name in kernels if name.startswith("portable_triton/") and name.endswith("-few")]
    assert len(few) > 15
    assert [name for name in few if kernels[name] == kernels[name.removesuffix("-few")]] == []


def test_few_variants_are_compiled() -> None:
    counts = count_variants("sm_90")
    assert counts["sizes"] and counts["alignments"]
    assert max(counts["sizes"].values()) <= ORDINARY, counts["sizes"]
    assert max(counts["alignments"].values()) <= ANY, counts["alignments"]
    assert all(number == 0 for number in counts["missed"].values()), counts["missed"]


def test_first_launch_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvhal.backends.portable_triton import launch
    from kvhal.errors import CaptureError

    monkeypatch.setattr(launch, "is_capturing", lambda device: True)
    kernel = launch.Kernel(defaultdict, (), 1, Platform("cpu", "x86_64"))
    kernel.function = type("Function", (), {"fn": test_few_variants_are_compiled})
    with pytest.raises(CaptureError, match="warmup"):
        kernel._compile((torch.zeros(1),))
