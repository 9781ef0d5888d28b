"""The text of the fused store's CUDA device functions, on a token's octets as fp32 in registers. Namespace ``kv``.

One fp32 operation at a time, in the order of docs/numerics.md. Every lane of a warp must come to each of them.
"""

#: rows and weights into registers, and the one rounding at the end
CONVERT = r"""
constexpr int VALUES = 8 * ROUNDS;
__device__ __forceinline__ void widen(float* v, const u32* raw) {
#pragma unroll
  for (int i = 0; i < 4; ++i) { v[2 * i] = low(raw[i]); v[2 * i + 1] = high(raw[i]); }
}
__device__ __forceinline__ void get_bf16(float* v, const void* p) { u32 raw[4]; get_row(raw, p); widen(v, raw); }
__device__ __forceinline__ void get_fp32(float* v, const void* p) {
  u32 raw[8];
  get_row(raw, p);
  get_row(raw + 4, (const u8*)p + 16);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(raw[i]);
}
__device__ __forceinline__ void narrow(u32* raw, const float* v) {
#pragma unroll
  for (int i = 0; i < VALUES / 2; ++i) raw[i] = round_pair(v[2 * i], v[2 * i + 1]);
}
"""

#: the sum of squares is a tree over adjacent pairs: inside an octet, across lanes, then across rounds
NORM = r"""
__device__ __forceinline__ void norm(float* v, const float* weight, float eps) {
  float sum[ROUNDS];
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    float s[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = __fmul_rn(v[8 * h + i], v[8 * h + i]);
#pragma unroll
    for (int n = 4; n > 0; n /= 2) {
#pragma unroll
      for (int i = 0; i < n; ++i) s[i] = __fadd_rn(s[2 * i], s[2 * i + 1]);
    }
    sum[h] = s[0];
#pragma unroll
    for (int n = 1; n < LANES; n *= 2) sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(0xFFFFFFFFu, sum[h], n));
  }
#pragma unroll
  for (int n = ROUNDS; n > 1; n = (n + 1) / 2) {
#pragma unroll
    for (int i = 0; i < (n + 1) / 2; ++i) sum[i] = 2 * i + 1 < n ? __fadd_rn(sum[2 * i], sum[2 * i + 1]) : sum[2 * i];
  }
  const float r = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum[0], (float)ELEMENTS), eps)));
#pragma unroll
  for (int i = 0; i < VALUES; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], r), weight[i]);
}
"""

#: pairs (2i, 2i + 1) that lie inside octets
ROPE_PAIRS = r"""
__device__ __forceinline__ void rope(float* v, const float* row, bool valid, int lane) {
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    if ((h + 1) * LANES * 8 <= ROPE_BEGIN || h * LANES * 8 >= ROPE_BEGIN + ROPE_DIM) continue;
    const int element = (h * LANES + lane) * 8 - ROPE_BEGIN;
    if constexpr (ROPE_WIDE) {
      if (element < 0 || element >= ROPE_DIM) continue;
      float c[4] = {}, s[4] = {};
      if (valid) { get<16, 16>((u32*)c, row + element / 2); get<16, 16>((u32*)s, row + ROPE_DIM / 2 + element / 2); }
#pragma unroll
      for (int i = 0; i < 4; ++i) rotate(v[8 * h + 2 * i], v[8 * h + 2 * i + 1], c[i], s[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        if (element + i < 0 || element + i >= ROPE_DIM) continue;
        const float* at = row + (element + i) / 2;
        rotate(v[8 * h + i], v[8 * h + i + 1], valid ? *at : 0.f, valid ? at[ROPE_DIM / 2] : 0.f);
      }
    }
  }
}
"""

ROTATE = r"""
__device__ __forceinline__ void rotate(float& a, float& b, float c, float s) {
  const float turned = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
  b = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
  a = turned;
}
"""

#: any other pairs meet in shared memory
ROPE_SHARED = r"""
__device__ __forceinline__ void rope(float* v, const float* row, bool valid, int lane) {
  __shared__ float exchange[TOKENS_A_BLOCK * ROPE_DIM];
  float* rotated = exchange + threadIdx.x / LANES * ROPE_DIM;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    const int at = (i / 8 * LANES + lane) * 8 + i % 8 - ROPE_BEGIN;
    if (at >= 0 && at < ROPE_DIM) rotated[at] = v[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    const int at = (i / 8 * LANES + lane) * 8 + i % 8 - ROPE_BEGIN;
    if (at < 0 || at >= ROPE_DIM) continue;
    const bool second = ROPE_NEOX ? at >= ROPE_DIM / 2 : at % 2;
    const int pair = ROPE_NEOX ? at % (ROPE_DIM / 2) : at / 2;
    const float other = rotated[ROPE_NEOX ? (second ? at - ROPE_DIM / 2 : at + ROPE_DIM / 2) : at ^ 1];
    const float c = valid ? row[pair] : 0.f, s = valid ? row[ROPE_DIM / 2 + pair] : 0.f;
    v[i] = second ? __fadd_rn(__fmul_rn(v[i], c), __fmul_rn(other, s)) : __fsub_rn(__fmul_rn(v[i], c), __fmul_rn(other, s));
  }
}
"""

#: inside an octet, across lanes (the product with +-1 is exact, so the fused operation rounds once), across rounds
HADAMARD = r"""
__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = __fadd_rn(a, b);
  b = __fsub_rn(a, b);
  a = sum;
}
__device__ __forceinline__ void hadamard(float* v, int lane) {
#pragma unroll
  for (int n = 1; n < 8; n *= 2) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) if (!(i & n)) butterfly(v[i], v[i + n]);
  }
#pragma unroll
  for (int n = 1; n < LANES; n *= 2) {
    const float sign = lane & n ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], n));
  }
#pragma unroll
  for (int n = 8; n < VALUES; n *= 2) {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) if (!(i & n)) butterfly(v[i], v[i + n]);
  }
#pragma unroll
  for (int i = 0; i < VALUES; ++i) v[i] = __fmul_rn(v[i], HADAMARD_SCALE);
}
"""
