"""The text of the fused store's CUDA device functions, on a token's octets as fp32 in registers. Namespace ``kv``.

One fp32 operation at a time, in the order of docs/numerics.md. Every thread of a thread block must come to each of them.
"""

#: rows and weights into registers, and the one rounding at the end
CONVERT = r"""
constexpr int VALUES = 8 * ROUNDS;
__device__ __forceinline__ int thread_blocks() { return gridDim.x; }  // a constant's address, where its formula is code
// Widened here, not later: what they came from is free for the next token.
template <int COUNT> __device__ __forceinline__ void pin(float* v) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(v[i]));
}
__device__ __forceinline__ void fetch_bf16(u32* raw, const void* p) { get_row(raw, p); }
__device__ __forceinline__ void fetch_fp32(u32* raw, const void* p) { get_row(raw, p); get_row(raw + 4, (const u8*)p + 16); }
__device__ __forceinline__ void widen_bf16(float* v, const u32* raw) {
#pragma unroll
  for (int i = 0; i < VALUES / 2; ++i) { v[2 * i] = low(raw[i]); v[2 * i + 1] = high(raw[i]); }
  pin<VALUES>(v);
}
__device__ __forceinline__ void widen_fp32(float* v, const u32* raw) {
#pragma unroll
  for (int i = 0; i < VALUES; ++i) v[i] = __uint_as_float(raw[i]);
}
__device__ __forceinline__ void narrow(u32* raw, const float* v) {
#pragma unroll
  for (int i = 0; i < VALUES / 2; ++i) raw[i] = round_pair(v[2 * i], v[2 * i + 1]);
}
"""

#: of the mean of squares
ROOT = r"""
// fl(1 / fl(sqrt(x))). Away from the ends of fp32's range both are one Newton step from the hardware's estimates, as the
// intrinsics' own fast paths (tests/gpu compares all inputs): one check instead of two, and no calls
__device__ __forceinline__ float inverse_root(float x) {
  if (!(x >= 0x1p-96f && x <= 0x1p96f)) return __frcp_rn(__fsqrt_rn(x));
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  float root = __fmul_rn(x, y);
  root = __fmaf_rn(__fmaf_rn(-root, root, x), __fmul_rn(y, 0.5f), root);
  return reciprocal(root);
}
"""

#: weights lie in shared memory, the first halves of all octets before the second ones, so that lanes read side by side, or,
#: not STAGED, in a lane's registers;
#: the sum of squares is a tree over adjacent pairs: inside an octet, across lanes, then across rounds. With two rounds, even
#: lanes sum the first and odd lanes the second, which halves the exchanges and changes no pair.
NORM = r"""
constexpr int SLOTS = ROUNDS * LANES;  // octets of a record and of its padding
template <int BYTES> __device__ __forceinline__ void stage(float* shared, const void* weight) {
  for (int octet = threadIdx.x; octet < SLOTS; octet += blockDim.x) {
    u32 v[8] = {}, raw[4];
    const u8* p = (const u8*)weight + octet * 8 * BYTES;
    if (octet < OCTETS) {
      if constexpr (BYTES == 4) {
        fetch_fp32(v, p);
      } else {
        get_row(raw, p);
#pragma unroll
        for (int i = 0; i < 4; ++i) { v[2 * i] = raw[i] << 16; v[2 * i + 1] = raw[i] & 0xFFFF0000u; }
      }
    }
    put<16, 16>(shared + octet * 4, v);
    put<16, 16>(shared + (SLOTS + octet) * 4, v + 4);
  }
}
__device__ __forceinline__ void stage_bf16(float* shared, const void* weight) { stage<2>(shared, weight); }
__device__ __forceinline__ void stage_fp32(float* shared, const void* weight) { stage<4>(shared, weight); }
__device__ __forceinline__ float across(float sum, int from) {
#pragma unroll
  for (int n = from; n < LANES && n < 32; n *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, n));
  if constexpr (LANES == 64) {  // two warps a token
    __shared__ float2 halves[TOKENS_A_BLOCK];
    if (threadIdx.x % 32 == 0) ((float*)halves)[threadIdx.x / 32] = sum;
    __syncthreads();
    const float2 both = halves[threadIdx.x / LANES];
    sum = __fadd_rn(both.x, both.y);
  }
  return sum;
}
__device__ __forceinline__ float4 weights(const float* weight, int half, int lane) {
  if constexpr (STAGED) return ((const float4*)weight)[half % 2 * SLOTS + half / 2 * LANES + lane];
  return make_float4(weight[4 * half], weight[4 * half + 1], weight[4 * half + 2], weight[4 * half + 3]);
}
__device__ __forceinline__ void norm(float* v, const float* weight, float eps, int lane) {
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
  }
  if constexpr (ROUNDS > 1 && ROUNDS <= LANES && (ROUNDS & (ROUNDS - 1)) == 0) {
#pragma unroll
    for (int n = 1; n < ROUNDS; n *= 2) {
#pragma unroll
      for (int i = 0; i < ROUNDS / 2 / n; ++i) {
        float& first = sum[i];
        const float second = sum[i + ROUNDS / 2 / n];
        const float mine = lane & n ? second : first, other = lane & n ? first : second;
        first = __fadd_rn(mine, __shfl_xor_sync(0xFFFFFFFFu, other, n));
      }
    }
    sum[0] = across(sum[0], ROUNDS);
#pragma unroll
    for (int n = ROUNDS / 2; n > 0; n /= 2) sum[0] = __fadd_rn(sum[0], __shfl_xor_sync(0xFFFFFFFFu, sum[0], n));
  } else {
#pragma unroll
    for (int h = 0; h < ROUNDS; ++h) sum[h] = across(sum[h], 1);
#pragma unroll
    for (int n = ROUNDS; n > 1; n = (n + 1) / 2) {
#pragma unroll
      for (int i = 0; i < (n + 1) / 2; ++i) sum[i] = 2 * i + 1 < n ? __fadd_rn(sum[2 * i], sum[2 * i + 1]) : sum[2 * i];
    }
  }
  const float mean = ELEMENTS & (ELEMENTS - 1) ? __fdiv_rn(sum[0], (float)ELEMENTS) : __fmul_rn(sum[0], 1.f / ELEMENTS);
  const float r = inverse_root(__fadd_rn(mean, eps));
#pragma unroll
  for (int h = 0; h < 2 * ROUNDS; ++h) {  // half octets
    if (SLOTS != OCTETS && h / 2 * LANES + lane >= OCTETS) continue;  // padding stays zero: 0 * Inf would be a group's NaN
    const float4 w = weights(weight, h, lane);
    v[4 * h] = __fmul_rn(__fmul_rn(v[4 * h], r), w.x);
    v[4 * h + 1] = __fmul_rn(__fmul_rn(v[4 * h + 1], r), w.y);
    v[4 * h + 2] = __fmul_rn(__fmul_rn(v[4 * h + 2], r), w.z);
    v[4 * h + 3] = __fmul_rn(__fmul_rn(v[4 * h + 3], r), w.w);
  }
}
"""

#: pairs that lie inside octets: a lane rotates its own; ROW_ALIGN says that rows of cosines and sines are aligned as well
ROPE_INSIDE = r"""
constexpr int HALF = ROPE_DIM / 2, SPAN_OF_ROUND = LANES * 8, FIRST_ROUND = ROPE_BEGIN / SPAN_OF_ROUND;
constexpr int ROPE_ROUNDS = (ROPE_BEGIN + ROPE_DIM - 1) / SPAN_OF_ROUND - FIRST_ROUND + 1;
__device__ __forceinline__ int first_pair(int round, int lane) {
  return (((FIRST_ROUND + round) * LANES + lane) * 8 - ROPE_BEGIN) / 2;
}
__device__ __forceinline__ void fetch_turns(float* turns, const float* row, bool valid, int lane) {
#pragma unroll
  for (int i = 0; i < 8 * ROPE_ROUNDS; ++i) turns[i] = 0.f;
#pragma unroll
  for (int h = 0; h < ROPE_ROUNDS; ++h) {
    const int pair = first_pair(h, lane);
    if (!valid || pair < 0 || pair >= HALF) continue;
    get_row((u32*)turns + 8 * h, row + pair);
    get_row((u32*)turns + 8 * h + 4, row + HALF + pair);
  }
}
__device__ __forceinline__ void rope(float* v, const float* turns, int lane) {
#pragma unroll
  for (int h = 0; h < ROPE_ROUNDS; ++h) {
    const int pair = first_pair(h, lane);
    if (pair < 0 || pair >= HALF) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& first = v[8 * (FIRST_ROUND + h) + 2 * i];
      float& second = v[8 * (FIRST_ROUND + h) + 2 * i + 1];
      const float a = first, b = second, c = turns[8 * h + i], s = turns[8 * h + 4 + i];
      first = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
      second = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
  }
}
"""

#: any other pairs: the rotated elements meet in shared memory, where every lane of the token takes a pair
ROPE = r"""
constexpr int HALF = ROPE_DIM / 2, TURNS = (HALF + LANES - 1) / LANES;
constexpr bool WHOLE_OCTETS = ROPE_BEGIN % 8 == 0 && ROPE_DIM % 8 == 0;
__device__ __forceinline__ void fetch_turns(float* turns, const float* row, bool valid, int lane) {
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int pair = i * LANES + lane;
    const bool there = valid && pair < HALF;
    turns[2 * i] = there ? row[pair] : 0.f;
    turns[2 * i + 1] = there ? row[HALF + pair] : 0.f;
  }
}
template <bool WRITE> __device__ __forceinline__ void exchange(float* shared, float* v, int lane) {
#pragma unroll
  for (int h = 0; h < ROUNDS; ++h) {
    if ((h + 1) * LANES * 8 <= ROPE_BEGIN || h * LANES * 8 >= ROPE_BEGIN + ROPE_DIM) continue;
    const int at = (h * LANES + lane) * 8 - ROPE_BEGIN;
    if constexpr (WHOLE_OCTETS) {
      if (at < 0 || at >= ROPE_DIM) continue;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        if constexpr (WRITE) put<16, 16>(shared + at + i, (u32*)(v + 8 * h + i));
        else get<16, 16>((u32*)(v + 8 * h + i), shared + at + i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (at + i < 0 || at + i >= ROPE_DIM) continue;
        if constexpr (WRITE) shared[at + i] = v[8 * h + i];
        else v[8 * h + i] = shared[at + i];
      }
    }
  }
}
__device__ __forceinline__ void rope(float* v, const float* turns, int lane) {
  __shared__ __align__(16) float rotated[TOKENS_A_BLOCK * ((ROPE_DIM + 3) / 4 * 4)];
  float* mine = rotated + threadIdx.x / LANES * ((ROPE_DIM + 3) / 4 * 4);
  exchange<true>(mine, v, lane);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int pair = i * LANES + lane;
    if (pair >= HALF) continue;
    float* first = mine + (ROPE_NEOX ? pair : 2 * pair);
    float* second = mine + (ROPE_NEOX ? pair + HALF : 2 * pair + 1);
    const float a = *first, b = *second, c = turns[2 * i], s = turns[2 * i + 1];
    *first = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    *second = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
  }
  __syncwarp();
  exchange<false>(mine, v, lane);
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
