"""The text of the codecs' CUDA device functions; `codec.source` puts it together for a format. Namespace ``kv``.

Exact by construction: integers on bit patterns, and single fp32 operations rounded to nearest even.
"""

#: which lanes and rounds share a scale, and which lane works it out: where a lane holds octets of several groups, each lane of
#: a group does so for some of its rounds
GROUPS = r"""
constexpr int SPAN = GROUP < LANES ? GROUP : LANES;       // lanes of a group
constexpr int DEPTH = GROUP < LANES ? 1 : GROUP / LANES;  // rounds of a group
constexpr int SPLIT = DEPTH > 1 || ROUNDS & (ROUNDS - 1) ? 1 : SPAN < ROUNDS ? SPAN : ROUNDS;  // lanes with scales of their own
constexpr int SCALES = ROUNDS / SPLIT;                                                         // of a lane
__device__ __forceinline__ int round_of(int scale, int lane) {
#pragma unroll
  for (int n = 1; n < SPLIT; n *= 2) if (lane & n) scale += ROUNDS / 2 / n;
  return scale;
}
__device__ constexpr int lane_of(int round) {
  int lane = 0;
  for (int n = 1; n < SPLIT; n *= 2) if (round & (ROUNDS / 2 / n)) lane += n;
  return lane;
}
"""

#: words to and from memory in the widest accesses that the alignment allows
MEMORY = r"""
template <int BYTES, int ALIGN> __device__ __forceinline__ void get(u32* r, const void* p) {
  if constexpr (ALIGN >= 16 && BYTES == 16) {
    const uint4 v = *(const uint4*)p;
    r[0] = v.x; r[1] = v.y; r[2] = v.z; r[3] = v.w;
  } else if constexpr (ALIGN >= 8 && BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) { const uint2 v = ((const uint2*)p)[i]; r[2 * i] = v.x; r[2 * i + 1] = v.y; }
  } else {
    constexpr int STEP = ALIGN < 4 ? ALIGN : 4;
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; ++i) {
      u32 word = 0;
#pragma unroll
      for (int b = 0; b < 4 && 4 * i + b < BYTES; b += STEP) {
        const u8* q = (const u8*)p + 4 * i + b;
        word |= (STEP == 4 ? *(const u32*)q : STEP == 2 ? (u32)*(const u16*)q : (u32)*q) << (8 * b);
      }
      r[i] = word;
    }
  }
}
template <int BYTES, int ALIGN> __device__ __forceinline__ void put(void* p, const u32* r) {
  if constexpr (ALIGN >= 16 && BYTES == 16) { *(uint4*)p = make_uint4(r[0], r[1], r[2], r[3]); }
  else if constexpr (ALIGN >= 8 && BYTES % 8 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) ((uint2*)p)[i] = make_uint2(r[2 * i], r[2 * i + 1]);
  } else {
    constexpr int STEP = ALIGN < 4 ? ALIGN : 4;
#pragma unroll
    for (int b = 0; b < BYTES; b += STEP) {
      u8* q = (u8*)p + b;
      const u32 piece = r[b / 4] >> (8 * (b % 4));
      if constexpr (STEP == 4) *(u32*)q = piece;
      else if constexpr (STEP == 2) *(u16*)q = (u16)piece;
      else *q = (u8)piece;
    }
  }
}
// A hint that reads nothing: what L2 holds is always what was written last
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
// An address that is worked out here, in front of a wait, and not behind it where it is used
__device__ __forceinline__ void ready(const void* p) { asm volatile("" :: "l"(__cvta_generic_to_global(p))); }
__device__ __forceinline__ void get_row(u32* r, const void* p) { get<16, ROW_ALIGN>(r, p); }
__device__ __forceinline__ void put_row(void* p, const u32* r) { put<16, ROW_ALIGN>(p, r); }
__device__ __forceinline__ void get_data(u32* r, const void* p) { get<DATA_BYTES, CACHE_ALIGN>(r, p); }
// For runs of records: the rest of the 256 bytes comes to L2 with them. Aligned, so it never leaves the allocation.
__device__ __forceinline__ void get_data_ahead(u32* r, const void* p) {
  if constexpr (DATA_BYTES == 8 && CACHE_ALIGN >= 8) {
    asm volatile("ld.global.L2::256B.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
  } else if constexpr (DATA_BYTES == 4 && CACHE_ALIGN >= 4) {
    asm volatile("ld.global.L2::256B.u32 %0, [%1];" : "=r"(r[0]) : "l"(p));
  } else {
    get_data(r, p);
  }
}
__device__ __forceinline__ void get_scale(u32* r, const void* p) { get<SF_BYTES, SF_ALIGN>(r, p); }
// a token's octets and the scales that this lane has, from the addresses of its first ones
__device__ __forceinline__ void put_record(void* data_at, void* sf_at, int lane, const u32* data, const u32* sf) {
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    const int octet = h * LANES + lane;
    if (octet < OCTETS) put<DATA_BYTES, CACHE_ALIGN>((u8*)data_at + octet * DATA_BYTES, data + h * ((DATA_BYTES + 3) / 4));
  }
#pragma unroll
  for (int i = 0; i < SCALES && QUANTIZED; ++i) {
    const int octet = round_of(i, lane) * LANES + (SPLIT > 1 ? lane / SPAN * SPAN : lane);  // the group's first one
    if (octet >= OCTETS || (SPLIT > 1 ? lane % SPAN >= SPLIT : octet % GROUP != 0)) continue;
    put<SF_BYTES, SF_ALIGN>((u8*)sf_at + octet / GROUP * SF_BYTES, sf + i);
  }
}
"""

FLOATS = r"""
// fl(1 / x) of e4m3 scales and of numbers well inside fp32's range: one Newton step, without the calls for all others
// (tests/triton and tests/gpu compare every input that there is)
__device__ __forceinline__ float reciprocal(float x, float times = 1.f) {
  float q; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(x));
  const float estimate = __fmul_rn(q, times);
  return __fmaf_rn(estimate, __fmaf_rn(-x, q, 1.f), estimate);
}
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
// nearest even; a NaN becomes 0x7FFF
__device__ __forceinline__ u32 round_pair(float first, float second) {
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first)); return r;
}
// nearest even, saturating; a NaN becomes 0x7F
__device__ __forceinline__ u32 e4m3_pair(float first, float second) {
  u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(second), "f"(first)); return r;
}
__device__ __forceinline__ float2 from_e4m3_pair(u32 pair) {
  float2 v;
  asm("{ .reg .b32 h; .reg .f16 a, b; cvt.rn.f16x2.e4m3x2 h, %2; mov.b32 {a, b}, h; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(v.x), "=f"(v.y) : "h"((u16)pair));
  return v;
}
"""

#: `decode(out, data, sf)`: an octet of bf16 from its data and its scale's bits
DECODE = {
    "e4m3": r"""
__device__ __forceinline__ void decode(u32 out[4], const u32 data[2], u32 sf) {
  const float s = scale_value(sf);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = from_e4m3_pair(data[i / 2] >> (16 * (i % 2)));
    out[i] = round_pair(__fmul_rn(v.x, s), __fmul_rn(v.y, s));
  }
}
""",
    # Both factors are exact in bf16 and have at most 6 significant bits together, so one bf16 product is the whole of it.
    # The bytes of e2m1's 8 magnitudes as bf16 come out of a byte permutation, four elements at a time.
    "e2m1": r"""
__device__ __forceinline__ void decode(u32 out[4], const u32 data[1], u32 sf) {
  const u32 s = __float_as_uint(scale_value(sf)) >> 16, scale2 = s << 16 | s;
  const u32 magnitude = data[0] & 0x77777777u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 codes = magnitude >> (16 * i), all = data[0] >> (16 * i);
    const u32 signs = __byte_perm(all << 4, all, 0x5140) & 0x80808080u;
    const u32 upper = __byte_perm(0x3F3F3F00u, 0x40404040u, codes) | signs;
    const u32 lower = __byte_perm(0xC0800000u, 0xC0804000u, codes);
    const u32 first = __byte_perm(lower, upper, 0x5140), second = __byte_perm(lower, upper, 0x7362);
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out[2 * i]) : "r"(first), "r"(scale2));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out[2 * i + 1]) : "r"(second), "r"(scale2));
  }
}
""",
}

#: an octet read back: decoded, or as it is
ROWS = r"""
__device__ __forceinline__ void decode_row(void* p, const u32* data, u32 sf) { u32 r[4]; decode(r, data, sf); put_row(p, r); }
"""
