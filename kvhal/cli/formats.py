"""`kvhal formats`: what a token's record holds, and what a block of them takes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvhal.cli.console import JsonOption, print_json, print_lines, print_table
from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat
from kvhal.layout import cache_geometry


def command(
    block_size: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens a block.")] = 64,
    json: JsonOption = False,
) -> None:
    """The byte table of the built-in record formats."""
    rows = [describe_format(name, layout, block_size) for name, layout in BUILTIN_FORMATS.items()]
    if json:
        print_json({"block_size": block_size, "formats": rows})
        return
    columns = {
        "format": "name",
        "use": "use",
        "data": "data",
        "elements": "elements",
        "group": "elements_per_scale",
        "scale": "scale",
        "bytes/token": "bytes_per_token",
        "order": "order",
        "a load gives": "load",
        "block bytes": "block_stride",
        "padding": "block_padding",
        "scales at": "scale_offset",
    }
    numbers = ("elements", "group", "bytes/token", "block bytes", "padding", "scales at")
    cells = [["-" if row[key] is None else row[key] for key in columns.values()] for row in rows]
    print_table(f"Record formats, blocks of {block_size} tokens", list(columns), cells, right=numbers)
    print_lines(
        "group: elements that share one scale. padding: unused bytes a block. scales at: byte of a block's first scale."
    )


def describe_format(name: str, layout: KVCacheFormat, block_size: int) -> dict[str, Any]:
    """One format's facts as JSON values; None where an unquantised record has no such thing."""
    geometry = cache_geometry(layout, block_size)
    quantized = layout.quantized_dtype is not None
    return {
        "name": name,
        "use": layout.note,
        "data": layout.quantized_dtype or "bf16",
        "elements": layout.elements,
        "elements_per_scale": layout.elements_per_sf if quantized else None,
        "scale": layout.sf_format,
        "data_bytes": layout.data_bytes,
        "scale_bytes": layout.sf_bytes,
        "bytes_per_token": layout.bytes_per_token,
        "order": ("data, scales a token" if layout.token_interleaved else "data rows, scale rows") if quantized else "data",
        "load": "data and scales" if layout.is_index else "bf16 rows",
        "block_stride": geometry.block_stride,
        "block_padding": geometry.block_stride - block_size * layout.bytes_per_token,
        "scale_offset": geometry.sf_offset if quantized else None,
    }
