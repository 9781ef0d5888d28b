"""The text of the device functions that quantise a token's octets (see codec_cuda). Namespace ``kv``."""

from kvhal.backends.e2m1_ptx import octet_codes

#: the largest magnitude of a group, and what becomes of elements that are not finite
REDUCE = r"""
// the larger magnitude of each half, with some sign; a NaN wins and is 0x7FFF
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  u32 r; asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}
__device__ __forceinline__ u32 largest(u32 pair) { return larger(pair, pair >> 16) & MAGNITUDE; }
// of the groups of all rounds, for every lane
__device__ __forceinline__ void reduce(u32 m[ROUNDS]) {
#pragma unroll
  for (int h = 0; h < ROUNDS; h += DEPTH) {
#pragma unroll
    for (int d = 1; d < DEPTH && h + d < ROUNDS; ++d) m[h] = larger(m[h], m[h + d]);
#pragma unroll
    for (int s = 1; s < SPAN; s *= 2) m[h] = larger(m[h], __shfl_xor_sync(0xFFFFFFFFu, m[h], s));
    m[h] = largest(m[h]);
#pragma unroll
    for (int d = 1; d < DEPTH && h + d < ROUNDS; ++d) m[h + d] = m[h];
  }
}
// of the groups whose scales the lane works out
__device__ __forceinline__ void reduce_own(u32 m[ROUNDS], int lane) {
  if constexpr (SPLIT == 1) {
    reduce(m);
  } else {
#pragma unroll
    for (int n = 1; n < SPLIT; n *= 2) {
#pragma unroll
      for (int i = 0; i < ROUNDS / 2 / n; ++i) {
        const u32 second = m[i + ROUNDS / 2 / n], mine = lane & n ? second : m[i], other = lane & n ? m[i] : second;
        m[i] = larger(mine, __shfl_xor_sync(0xFFFFFFFFu, other, n));
      }
    }
#pragma unroll
    for (int i = 0; i < SCALES; ++i) {
#pragma unroll
      for (int s = SPLIT; s < SPAN; s *= 2) m[i] = larger(m[i], __shfl_xor_sync(0xFFFFFFFFu, m[i], s));
      m[i] = largest(m[i]);
    }
  }
}
// what the lane that worked it out has for a round
template <typename V> __device__ __forceinline__ V of_round(const V* own, int round) {
  if constexpr (SPLIT == 1) return own[round];
  else return __shfl_sync(0xFFFFFFFFu, own[round % SCALES], lane_of(round), SPLIT);
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

#: data type -> `for_encode(sf)`: what `encode` wants the reciprocal of a scale multiplied by
FACTORS = {
    "e4m3": r"""
__device__ __forceinline__ float for_encode(float) { return 1.f; }
""",
    # 2^-14, see ENCODE. The fp32 product of the rounded reciprocal of scales of mantissa 15/8 lies one ulp above some ties,
    # which fp16 would not see: a multiplier larger by 3 * 2^-11 keeps those above, and moves no other value across a tie.
    "e2m1": r"""
__device__ __forceinline__ float for_encode(float sf) {
  return (__float_as_uint(sf) & 0x7FFFFFu) == 0x700000u ? 0x1.006p-14f : 0x1p-14f;
}
""",
}

#: format of the scale -> `scale(amax, multiplier)`: the scale's bits; `scale_value(bits)`: what it multiplies
SCALES = {
    "ue8m0": r"""
__device__ __forceinline__ u32 scale(u32 amax, float& multiplier) {
  const int b = max((int)((amax + UE8M0_CARRY) >> MANTISSA_BITS) - UE8M0_SHIFT, UE8M0_FLOOR);
  multiplier = __fmul_rn(__uint_as_float((254u - b) << 23), for_encode(1.f));
  return b;
}
__device__ __forceinline__ float scale_value(u32 sf) { return __uint_as_float(sf << 23); }
""",
    "e4m3": r"""
__device__ __forceinline__ u32 scale(u32 amax, float& multiplier) {
  const float largest = fmaxf(__uint_as_float(amax << 16), E4M3_SF_FLOOR);
  const u32 sf = e4m3_pair(__fmul_rn(largest, E4M3_SF_RECIPROCAL), 0.f);  // the cast saturates
  const float value = from_e4m3_pair(sf).x;
  multiplier = reciprocal(value, for_encode(value));
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

#: `encode(data, raw, multiplier)`: an octet's data from its bf16, which are finite (or, for e4m3, NaN), and for e2m1 of a group
#: that fits, or SATURATE
ENCODE = {
    # A power of two times a bf16 is exact in bf16, two at a time, down to where e4m3 has only zeros.
    "e4m3": r"""
constexpr bool SATURATES = false;  // beyond what the cast does itself
__device__ __forceinline__ bool fits(u32 amax) { return amax < INF; }
__device__ __forceinline__ u32 scaled_pair(u32 pair, float multiplier) {
  if constexpr (POWER_OF_TWO) {
    const u32 m = __float_as_uint(multiplier) >> 16;
    u32 r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(m << 16 | m));
    return e4m3_pair(low(r), high(r));
  }
  return e4m3_pair(__fmul_rn(low(pair), multiplier), __fmul_rn(high(pair), multiplier));
}
template <bool SATURATE> __device__ __forceinline__ void encode(u32 data[2], const u32 raw[4], float multiplier) {
#pragma unroll
  for (int i = 0; i < 2; ++i) data[i] = scaled_pair(raw[2 * i], multiplier) | scaled_pair(raw[2 * i + 1], multiplier) << 16;
}
""",
    # Two elements a register, as fp16 scaled by 2^-14, where e2m1's subnormal is one of fp16's: the code is then the rounded
    # upper bits. fp16 keeps every tie a tie and every other value off it (tests/compile proves it for all inputs).
    "e2m1": r"""
constexpr bool SATURATES = !POWER_OF_TWO;  // where a group does not fit
// finite, and its scale covers it: nothing would round to more than 6
__device__ __forceinline__ bool fits(u32 amax) {
  return SATURATES ? amax <= COVERED && amax - UNCOVERED_FROM > UNCOVERED_TO - UNCOVERED_FROM : amax < INF;
}
template <bool SATURATE> __device__ __forceinline__ void encode(u32 data[1], const u32 raw[4], float scaled) {
  if constexpr (SATURATE) {
    asm("SATURATED_CODES" : "=r"(data[0]) : "r"(raw[0]), "r"(raw[1]), "r"(raw[2]), "r"(raw[3]), "f"(scaled));
  } else {
    asm("OCTET_CODES" : "=r"(data[0]) : "r"(raw[0]), "r"(raw[1]), "r"(raw[2]), "r"(raw[3]), "f"(scaled));
  }
}
""".replace("OCTET_CODES", octet_codes("%", saturate=False)).replace("SATURATED_CODES", octet_codes("%", saturate=True)),
}

#: one token's octets: data and scale of each; every lane of the warp must be here
QUANTIZE = r"""
constexpr int DATA_WORDS = DATA_BYTES / 4;
__device__ __forceinline__ void magnitudes(u32 m[ROUNDS], const u32* raw) {
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h, raw += 4) m[h] = larger(larger(raw[0], raw[1]), larger(raw[2], raw[3]));
}
// where some are not numbers; each lane works out the scales of all of its octets, and keeps its own
__device__ __forceinline__ void quantize_any(u32* data, u32* sf, u32* raw, int lane) {
  u32 m[ROUNDS];
  bool poisoned[ROUNDS];
  magnitudes(m, raw);
  reduce(m);
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    poisoned[h] = !HOLDS_NAN && m[h] > INF;
    m[h] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      m[h] = larger(m[h], finite(raw[4 * h + i], false));
      raw[4 * h + i] = poisoned[h] ? 0u : finite(raw[4 * h + i], true);
    }
  }
  reduce(m);
  u32 byte;
  float multiplier;
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    if (h % DEPTH == 0) byte = scale(m[h], multiplier);
    encode<true>(data + DATA_WORDS * h, raw + 4 * h, multiplier);
    if (lane % SPLIT == lane_of(h)) sf[h % SCALES] = poisoned[h] ? SF_NAN : byte;
  }
}
// where all of them are numbers
template <bool SATURATE> __device__ __forceinline__ void quantize_numbers(u32* data, u32* sf, const u32* raw, const u32* own) {
  float multiplier[SCALES];
#pragma unroll
  for (int i = 0; i < SCALES; ++i) {
    if (i % DEPTH == 0) {
      sf[i] = scale(own[i], multiplier[i]);
    } else {
      sf[i] = sf[i - 1];
      multiplier[i] = multiplier[i - 1];
    }
  }
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) encode<SATURATE>(data + DATA_WORDS * h, raw + 4 * h, of_round(multiplier, h));
}
__device__ __forceinline__ void quantize(u32* data, u32* sf, u32* raw) {
  const int lane = threadIdx.x;
  u32 m[ROUNDS];
  magnitudes(m, raw);
  reduce_own(m, lane);
  bool fit = true, numbers = true;
#pragma unroll
  for (int i = 0; i < SCALES; ++i) { fit &= fits(m[i]); numbers &= m[i] < INF; }
  if (!__any_sync(0xFFFFFFFFu, !fit)) return quantize_numbers<false>(data, sf, raw, m);
  if (SATURATES && !__any_sync(0xFFFFFFFFu, !numbers)) return quantize_numbers<true>(data, sf, raw, m);
  quantize_any(data, sf, raw, lane);
}
// the scales of all rounds
__device__ __forceinline__ void spread(u32* all, const u32* sf) {
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) all[h] = of_round(sf, h);
}
"""
