"""The codecs take slices of record bytes, wherever they lie."""

from __future__ import annotations

import pytest
import torch

from kvhal import numerics
from kvhal.testing.formats import CONFORMANCE_FORMATS


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("name", [name for name, layout in CONFORMANCE_FORMATS.items() if layout.quantized_dtype])
def test_dequantize_reads_data_and_scales_at_any_address(name: str, offset: int) -> None:
    layout = CONFORMANCE_FORMATS[name]
    rows = torch.randn(3, layout.elements, generator=torch.Generator().manual_seed(offset)).to(torch.bfloat16)
    data, sf = numerics.quantize(rows, layout)
    records = torch.zeros(3, offset + layout.bytes_per_token, dtype=torch.uint8)
    records[:, offset:] = torch.cat((data, sf), 1)
    part = records[:, offset:]
    sliced = numerics.dequantize(part[:, : layout.data_bytes], part[:, layout.data_bytes :], layout)
    assert torch.equal(sliced.view(torch.int16), numerics.dequantize(data, sf, layout).view(torch.int16))
