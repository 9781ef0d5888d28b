"""The text of the codecs' CUDA device functions; `codec.source` puts it together for a format. Namespace ``kv``.

Exact by construction: integers on bit patterns, and single fp32 operations rounded to nearest even.
"""

from kvhal.backends.e2m1_ptx import octet_codes

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
// a token's octets and scales, from the addresses of its first ones
__device__ __forceinline__ void put_record(void* data_at, void* sf_at, int lane, const u32* data, const u32* sf) {
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    const int octet = h * LANES + lane;
    if (octet >= OCTETS) continue;
    put<DATA_BYTES, CACHE_ALIGN>((u8*)data_at + octet * DATA_BYTES, data + h * ((DATA_BYTES + 3) / 4));
    const int group = GROUP <= LANES ? h * (LANES / GROUP) + lane / GROUP : octet / GROUP;
    if (octet % GROUP == 0 && QUANTIZED) put<SF_BYTES, SF_ALIGN>((u8*)sf_at + group * SF_BYTES, sf + h);
  }
}
"""

FLOATS = r"""
// fl(1 / x) of e4m3 scales and of numbers well inside fp32's range: one Newton step, without the calls for all others
// (tests/triton and tests/gpu compare every input that there is)
__device__ __forceinline__ float reciprocal(float x) {
  float q; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(x));
  return __fmaf_rn(q, __fmaf_rn(-x, q, 1.f), q);
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

#: the largest magnitude of a group, and what becomes of elements that are not finite
REDUCE = r"""
constexpr int SPAN = GROUP < LANES ? GROUP : LANES;    // lanes of a group
constexpr int DEPTH = GROUP < LANES ? 1 : GROUP / LANES;  // rounds of a group
// the larger magnitude of each half, with some sign; a NaN wins and is 0x7FFF
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  u32 r; asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
__device__ __forceinline__ void reduce(u32 m[ROUNDS]) {
#pragma unroll
  for (int h = 0; h < ROUNDS; h += DEPTH) {
#pragma unroll
    for (int d = 1; d < DEPTH && h + d < ROUNDS; ++d) m[h] = larger(m[h], m[h + d]);
#pragma unroll
    for (int s = 1; s < SPAN; s *= 2) m[h] = larger(m[h], __shfl_xor_sync(0xFFFFFFFFu, m[h], s));
    m[h] = larger(m[h], m[h] >> 16) & MAGNITUDE;
#pragma unroll
    for (int d = 1; d < DEPTH && h + d < ROUNDS; ++d) m[h + d] = m[h];
  }
}
// Inf as the largest finite value; NaN as 0 where it only must not count, as itself where it is an element
__device__ __forceinline__ u32 finite(u32 pair, bool keep_nan) {
  u32 r = 0;
#pragma unroll
  for (int i = 0; i < 32; i += 16) {
    u32 e = (pair >> i) & 0xFFFFu;
    const u32 magnitude = e & MAGNITUDE;
    if (magnitude == INF) e -= 1;
    if (magnitude > INF) e = keep_nan ? (u32)MAGNITUDE : 0u;
    r |= e << i;
  }
  return r;
}
"""

#: format of the scale -> `scale(amax, multiplier)`: the scale's bits; `scale_value(bits)`: what it multiplies
SCALES = {
    "ue8m0": r"""
__device__ __forceinline__ u32 scale(u32 amax, float& multiplier) {
  const int b = max((int)((amax + UE8M0_CARRY) >> MANTISSA_BITS) - UE8M0_SHIFT, UE8M0_FLOOR);
  multiplier = __uint_as_float((254u - b) << 23);
  return b;
}
__device__ __forceinline__ float scale_value(u32 sf) { return __uint_as_float(sf << 23); }
""",
    "e4m3": r"""
__device__ __forceinline__ u32 scale(u32 amax, float& multiplier) {
  const float largest = fmaxf(__uint_as_float(amax << 16), E4M3_SF_FLOOR);
  const u32 sf = e4m3_pair(fminf(__fmul_rn(largest, E4M3_SF_RECIPROCAL), E4M3_LARGEST), 0.f);
  multiplier = reciprocal(from_e4m3_pair(sf).x);
  return sf;
}
__device__ __forceinline__ float scale_value(u32 sf) { return from_e4m3_pair(sf).x; }
""",
    "fp32": r"""
__device__ __forceinline__ u32 scale(u32 amax, float& multiplier) {
  // fl(largest / E4M3_LARGEST), by its rounded reciprocal and one correction (tests/compile proves it for all amaxes)
  const float largest = fmaxf(__uint_as_float(amax << 16), FP32_SF_FLOOR);
  const float q = __fmul_rn(largest, 1.f / E4M3_LARGEST);
  const float sf = __fmaf_rn(__fmaf_rn(-q, E4M3_LARGEST, largest), 1.f / E4M3_LARGEST, q);
  multiplier = reciprocal(sf);
  return __float_as_uint(sf);
}
__device__ __forceinline__ float scale_value(u32 sf) { return __uint_as_float(sf); }
""",
}

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

#: `encode(data, raw, multiplier)`: an octet's data from its bf16, which are finite (or, for e4m3, NaN)
ENCODE = {
    # A power of two times a bf16 is exact in bf16, two at a time, down to where e4m3 has only zeros.
    "e4m3": r"""
__device__ __forceinline__ u32 scaled_pair(u32 pair, float multiplier) {
  if constexpr (POWER_OF_TWO) {
    const u32 m = __float_as_uint(multiplier) >> 16;
    u32 r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(m << 16 | m));
    return e4m3_pair(low(r), high(r));
  }
  return e4m3_pair(__fmul_rn(low(pair), multiplier), __fmul_rn(high(pair), multiplier));
}
__device__ __forceinline__ void encode(u32 data[2], const u32 raw[4], float multiplier) {
#pragma unroll
  for (int i = 0; i < 2; ++i) data[i] = scaled_pair(raw[2 * i], multiplier) | scaled_pair(raw[2 * i + 1], multiplier) << 16;
}
""",
    # Two elements a register, as fp16 scaled by 2^-14, where e2m1's subnormal is one of fp16's: the code is then the rounded
    # upper bits. fp16 keeps every tie a tie and every other value off it (tests/compile proves it for all inputs) but for
    # scales of mantissa 15/8: the fp32 product of their rounded reciprocal lies one ulp above some ties, which fp16 would
    # not see. A multiplier larger by 2^-10.5 keeps those above, and moves no value across another tie.
    "e2m1": r"""
constexpr u32 ABOVE_TIES = 0x088889u, NUDGE = 0x1800u;  // mantissa of fl(1 / 1.875); 2^-10.5 of it
__device__ __forceinline__ void encode(u32 data[1], const u32 raw[4], float multiplier) {
  const u32 bits = __float_as_uint(multiplier);
  const float scaled = __fmul_rn(__uint_as_float(bits + ((bits & 0x7FFFFFu) == ABOVE_TIES ? NUDGE : 0u)), 0x1p-14f);
  asm("OCTET_CODES" : "=r"(data[0]) : "r"(raw[0]), "r"(raw[1]), "r"(raw[2]), "r"(raw[3]), "f"(scaled));
}
""".replace("OCTET_CODES", octet_codes("%")),
}

#: an octet read back: decoded, or as it is
ROWS = r"""
__device__ __forceinline__ void decode_row(void* p, const u32* data, u32 sf) { u32 r[4]; decode(r, data, sf); put_row(p, r); }
"""

#: one token's octets: data and scale of each; every lane of the warp must be here
QUANTIZE = r"""
constexpr int DATA_WORDS = DATA_BYTES / 4;
__device__ __forceinline__ void quantize(u32* data, u32* sf, u32* raw) {
  u32 m[ROUNDS];
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    m[h] = larger(larger(raw[4 * h], raw[4 * h + 1]), larger(raw[4 * h + 2], raw[4 * h + 3]));
  }
  reduce(m);
  bool poisoned[ROUNDS], rare = false;
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) { rare |= m[h] > MAX_FINITE; poisoned[h] = !HOLDS_NAN && m[h] > INF; }
  if (__any_sync(0xFFFFFFFFu, rare)) {
#pragma unroll
    for (int h = 0; h < ROUNDS; ++h) {
      m[h] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        m[h] = larger(m[h], finite(raw[4 * h + i], false));
        raw[4 * h + i] = poisoned[h] ? 0u : finite(raw[4 * h + i], true);
      }
    }
    reduce(m);
  }
  float multiplier;
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    if (h % DEPTH == 0) sf[h] = scale(m[h], multiplier);
    else sf[h] = sf[h - 1];
    encode(data + DATA_WORDS * h, raw + 4 * h, multiplier);
    if (poisoned[h]) sf[h] = SF_NAN;
  }
}
"""
