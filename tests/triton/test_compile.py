"""Every kernel compiles ahead of time for every target, without a device; and few variants of each are ever compiled."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from tests.triton.aot import TARGETS, Job, compile_all, count_variants, jobs

pytest.importorskip("triton")

ORDINARY = 2  #: variants of one kernel when rows lie as frameworks allocate them: int32 and int64 slots
ANY = 16  #: variants of one kernel over all alignments of rows and both types of slots


def chosen(arch: str) -> list[Job]:
    """All jobs where the project's numbers come from; elsewhere one of each kernel and codec, to bound the time."""
    if arch == "sm_90":
        return jobs(arch)
    formats = {"V41_FORMAT", "V41_FP4_FORMAT", "FP8_FLOAT32_SF_INDEX_KV_FORMAT", "BF16_FORMAT", None}
    return [job for job in jobs(arch) if job.format in formats and job.variant in ("", "norm-rope")]


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_compiles(arch: str, record_property: pytest.RecordProperty) -> None:
    built = compile_all(chosen(arch))
    for result in built:
        print(f"{result.job}: {result.size} bytes in {result.seconds:.1f} s {result.error}")
    record_property("compiled", " ".join(str(result.job) for result in built))
    assert [f"{result.job}: {result.error}" for result in built if result.error] == []
    assert all(result.size for result in built)


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
    kernel = launch.Kernel(defaultdict, (), 1)
    kernel.function = type("Function", (), {"fn": test_few_variants_are_compiled})
    with pytest.raises(CaptureError, match="warmup"):
        kernel._compile((torch.zeros(1),))
