"""A load of many segments of records with their scales behind them: bulk copies to shared memory, from there to registers.

A record of 528 bytes ends in the middle of a sector, and the next one begins there: whoever reads them one by one has these
sectors pass L2 twice. A bulk copy of a tile has them once; it waits longer for its first byte, which many thread blocks hide.
"""

from typing import Any

import tilelang.language as T

from kvhal.backends.cuda_tilelang.build import call
from kvhal.backends.cuda_tilelang.codec import WARP, Octets, source
from kvhal.backends.cuda_tilelang.host import ANY_COUNT, Counts, launch_only_if
from kvhal.backends.cuda_tilelang.segments import await_segments, covered_rows, main_load
from kvhal.formats import KVCacheFormat
from kvhal.layout import cache_geometry
from kvhal.tuning import Shape

COPY_BYTES = 16  #: divides the addresses and the size of a bulk copy

LOAD_TILE = r"""
// Records of `count` tokens, one behind the other, to rows of bf16 that are `stride` elements apart; rows of zeros where there
// are no records. Every thread of the thread block must be here.
__device__ __forceinline__ void load_tile(const void* records, void* rows, long long stride, int count, bool exist) {
  __shared__ __align__(128) u8 tile[TILE * RECORD_BYTES];
  __shared__ __align__(8) unsigned long long arrived;
  const u32 barrier = (u32)__cvta_generic_to_shared(&arrived);
  if (count <= 0) return;
  if (exist) {
    if (threadIdx.x == 0) {
      const u32 bytes = count * RECORD_BYTES, to = (u32)__cvta_generic_to_shared(tile);
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(to), "l"(records), "r"(bytes), "r"(barrier) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred done; W%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; @!done bra W%=; }"
                 :: "r"(barrier) : "memory");
  }
  const int lane = threadIdx.x % LANES;
  static_assert(TILE * LANES % THREADS == 0, "every thread has as many rows of a whole tile");
#pragma unroll
  for (int i = 0; i < TILE * LANES / THREADS; ++i) {
    const int token = i * (THREADS / LANES) + threadIdx.x / LANES;
    if (token >= count) break;
    const u8* record = tile + token * RECORD_BYTES;
#pragma unroll
    for (int h = 0; h < ROUNDS; ++h) {
      const int octet = h * LANES + lane;
      if (octet >= OCTETS) continue;
      u32 data[2] = {}, sf = 0;
      if (exist) {
        get<DATA_BYTES, CACHE_ALIGN>(data, record + octet * DATA_BYTES);
        get_scale(&sf, record + OCTETS * DATA_BYTES + octet / GROUP * SF_BYTES);
      }
      decode_row((u8*)rows + (token * stride + octet * 8) * 2, data, sf);
    }
  }
}
"""


def takes(layout: KVCacheFormat) -> bool:
    """Its records are runs of bytes that bulk copies can take, and each has a warp's lanes."""
    if layout.is_index or layout.quantized_dtype is None or not layout.token_interleaved:
        return False
    return layout.bytes_per_token % COPY_BYTES == 0 and Octets.of(layout).lanes == WARP


def load_bulk_kernel(layout: KVCacheFormat, block_size: int, alignment: int, shape: Shape, counts: Counts = ANY_COUNT) -> Any:
    """As `load.load_kernel`, of formats that it `takes`."""
    geometry, (tile, threads) = cache_geometry(layout, block_size), shape[:2]
    tiles = -(-block_size // tile)
    main = main_load(geometry, alignment, counts)
    constants = {"TILE": tile, "THREADS": threads, "RECORD_BYTES": layout.bytes_per_token}
    lines = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    prelude = source(geometry, alignment) + "namespace kv {\n" + lines + LOAD_TILE + "}  // namespace kv\n"

    @T.prim_func
    def load_bulk(cache: main.cache, segments: main.segments, total_k: T.int64, out: main.out, out_sf: main.out_sf):
        launch_only_if(main.fit(cache, total_k, out))
        with T.Kernel(main.count * tiles, threads=threads, prelude=prelude) as program:
            await_segments(segments, program, tiles, main.count)
            block, shift, first, last = covered_rows(segments, program // tiles, program % tiles * tile, block_size, total_k)
            exist = (block >= 0) & (block < main.blocks)
            here = T.if_then_else(exist & (first < last), block, T.int64(0))
            call(
                "kv::load_tile",
                T.address_of(cache[here, 0, 0, T.cast(first, "int64") * geometry.data_token_stride]),
                T.address_of(out[shift + first, 0]),
                main.out_stride,
                T.min(last - first, tile),
                exist,
            )

    return load_bulk
