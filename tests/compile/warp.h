// Enough of CUDA and PTX to run kernels on the host: a thread is a fiber, and fibers of a warp meet in every exchange. Thread
// blocks run one after the other. What goes wrong is noted in `failure`.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ static inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

typedef unsigned char uchar;
typedef unsigned int uint;
typedef uint16_t bfloat16_t;
template <class T> static T max(T a, T b) { return a < b ? b : a; }
template <class T> static T min(T a, T b) { return b < a ? b : a; }
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From> static To cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static float __uint_as_float(uint32_t v) { return cast<float>(v); }
static uint32_t __float_as_uint(float v) { return cast<uint32_t>(v); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __frcp_rn(float a) { return 1 / a; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

static void cudaTriggerProgrammaticLaunchCompletion() {}
static void cudaGridDependencySynchronize() {}

static const char* failure;
static void wrong(const char* what) { if (!failure) failure = what; }
// called by code of -fsanitize=alignment
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { wrong("an address is not aligned"); }

// Whoever is last to a meeting goes on; the others are resumed one after the other.
constexpr int THREADS = 256, WARP = 32, STACK = 1 << 16;
struct Meeting { unsigned here, turn; const char* where; };
static ucontext_t starts[THREADS];
static jmp_buf scheduler, fibers[THREADS];  // unlike swapcontext, a jump is no system call
alignas(64) static char stacks[THREADS * STACK];
static Meeting warps[THREADS / WARP], everyone;
static uint32_t posted[2][THREADS];  // an exchange may begin while the last one is still read
static bool done[THREADS], moved;
static void (*body)(const void*);
static const void* call;

static void pause() {
  const unsigned me = threadIdx.x;
  if (!_setjmp(fibers[me])) _longjmp(scheduler, 1);
  threadIdx.x = me;
}
static void enter() {
  body(call);
  done[threadIdx.x] = moved = true;
  pause();
}
static void resume(bool first) {
  if (_setjmp(scheduler)) return;
  if (first) setcontext(&starts[threadIdx.x]);
  _longjmp(fibers[threadIdx.x], 1);
}
static void run_block() {
  for (Meeting& warp : warps) warp = {};
  everyone = {};
  for (unsigned i = 0; i < blockDim.x; ++i) {
    getcontext(&starts[i]);
    starts[i].uc_stack.ss_sp = &stacks[i * STACK];
    starts[i].uc_stack.ss_size = STACK;
    makecontext(&starts[i], enter, 0);
    done[i] = false;
  }
  bool first = true;
  do {
    moved = false;
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
      if (!done[threadIdx.x]) resume(first);
    }
    first = false;
  } while (moved);
  for (unsigned i = 0; i < blockDim.x; ++i) if (!done[i]) wrong("threads wait for others that do not come");
}
template <class F> static const char* run_grid(int blocks, int threads, const F& thread) {
  failure = nullptr, call = &thread, body = [](const void* thread) { (*(const F*)thread)(); };
  gridDim.x = blocks, blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x && !failure; ++blockIdx.x) run_block();
  return failure;
}
static void meet(Meeting& at, unsigned count, const char* where) {
  const unsigned turn = at.turn;
  if (at.here++ == 0) at.where = where;
  if (at.where != where) wrong("threads meet in different places");
  if (at.here == count) {
    at.here = 0;
    at.turn += 1;
    moved = true;
  }
  while (at.turn == turn) pause();
}
// what every lane of the warp has, until the exchange after the next one
static const uint32_t* of_warp(uint32_t value, const char* where) {
  Meeting& warp = warps[threadIdx.x / WARP];
  uint32_t* all = posted[warp.turn % 2];
  all[threadIdx.x] = value;
  meet(warp, WARP, where);
  return all + threadIdx.x / WARP * WARP;
}
template <class V> static V __shfl_xor_sync(uint32_t, V value, int lanes) {
  return cast<V>(of_warp(cast<uint32_t>(value), "xor")[threadIdx.x % WARP ^ lanes]);
}
template <class V> static V __shfl_sync(uint32_t, V value, int lane, int width) {
  return cast<V>(of_warp(cast<uint32_t>(value), "lane")[threadIdx.x % WARP / width * width + lane % width]);
}
static bool __any_sync(uint32_t, bool mine) {
  const uint32_t* all = of_warp(mine, "any");
  for (int i = 0; i < WARP; ++i) if (all[i]) return true;
  return false;
}
static void __syncwarp() { meet(warps[threadIdx.x / WARP], WARP, "warp"); }
static void __syncthreads() { meet(everyone, blockDim.x, "block"); }

// PTX on registers of 32 bits. Numbers are made in double precision, and rounded once.
static int units_off;  // of the hardware's estimates, in the last place

static float estimate(double value) { return cast<float>(cast<uint32_t>((float)value) + units_off); }
// the nearest number of so many bits, ties to even, and no magnitude larger than the code `most`; `nan` for a NaN
static uint32_t narrow(double value, int exponent, int mantissa, int64_t most, uint32_t nan) {
  if (std::isnan(value)) return nan;
  const int bias = (1 << (exponent - 1)) - 1;
  const uint32_t sign = (uint32_t)std::signbit(value) << (exponent + mantissa);
  if (std::isinf(value)) return sign | most;
  int e;
  frexp(value, &e);
  e = value == 0 ? 1 - bias : max(e - 1, 1 - bias);
  const int64_t units = nearbyint(ldexp(fabs(value), mantissa - e));
  return sign | (uint32_t)min(units + ((int64_t)(e + bias - 1) << mantissa), most);
}
static double wide(uint32_t bits, int exponent, int mantissa) {
  const int e = bits >> mantissa & ((1 << exponent) - 1), bias = (1 << (exponent - 1)) - 1;
  const uint32_t m = bits & ((1 << mantissa) - 1);
  const double magnitude = e ? ldexp((1 << mantissa) + m, e - bias - mantissa) : ldexp(m, 1 - bias - mantissa);
  return bits >> (exponent + mantissa) & 1 ? -magnitude : magnitude;
}
static uint32_t fp16(float value) { return narrow(value, 5, 10, 0x7C00, 0x7FFF); }
static uint32_t bf16(double value) { return narrow(value, 8, 7, 0x7F80, 0x7FFF); }
static uint32_t e4m3(float value) { return narrow(value, 4, 3, 0x7E, 0x7F); }  // saturates
template <class F> static uint32_t halves(uint32_t a, uint32_t b, F of) {
  return of(a >> 16, b >> 16) << 16 | of(a & 0xFFFF, b & 0xFFFF);
}
static uint32_t bits(float v) { return cast<uint32_t>(v); }
static uint32_t bits(uint32_t v) { return v; }
static uint32_t bits(uint16_t v) { return v; }
static void give(float& to, uint32_t v) { to = cast<float>(v); }
static void give(uint32_t& to, uint32_t v) { to = v; }
static void give(uint16_t& to, uint32_t v) { to = v; }

static uint32_t mov_b32(uint32_t a) { return a; }
static uint32_t shl_b32(uint32_t a, uint32_t b) { return a << b; }
static uint32_t shr_u32(uint32_t a, uint32_t b) { return a >> b; }
static uint32_t and_b32(uint32_t a, uint32_t b) { return a & b; }
static uint32_t or_b32(uint32_t a, uint32_t b) { return a | b; }
static uint32_t add_u32(uint32_t a, uint32_t b) { return a + b; }
static uint32_t lop3_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t r = 0;
  for (int i = 0; i < 32; ++i) r |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
  return r;
}
static uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = selector >> (4 * i), byte = (uint32_t)(((uint64_t)b << 32 | a) >> (8 * (s & 7))) & 0xFF;
    r |= (s & 8 ? (byte >> 7) * 0xFF : byte) << (8 * i);
  }
  return r;
}
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) { return prmt_b32(a, b, selector & 0x7777); }
static uint32_t mul_rn_f32(uint32_t a, uint32_t b) { return bits(cast<float>(a) * cast<float>(b)); }
static uint32_t rcp_approx_ftz_f32(uint32_t a) { return bits(estimate(1 / (double)cast<float>(a))); }
static uint32_t rsqrt_approx_ftz_f32(uint32_t a) { return bits(estimate(1 / sqrt((double)cast<float>(a)))); }
static uint32_t cvt_rn_bf16x2_f32(uint32_t a, uint32_t b) { return bf16(cast<float>(a)) << 16 | bf16(cast<float>(b)); }
static uint32_t cvt_rn_f16x2_f32(uint32_t a, uint32_t b) { return fp16(cast<float>(a)) << 16 | fp16(cast<float>(b)); }
static uint32_t cvt_rn_satfinite_e4m3x2_f32(uint32_t a, uint32_t b) { return e4m3(cast<float>(a)) << 8 | e4m3(cast<float>(b)); }
static uint32_t cvt_rn_f16x2_e4m3x2(uint32_t pair) {
  const auto one = [](uint32_t code) { return (code & 0x7F) == 0x7F ? 0x7FFF : fp16((float)wide(code, 4, 3)); };
  return one(pair >> 8 & 0xFF) << 16 | one(pair & 0xFF);
}
static uint32_t cvt_f32_f16(uint32_t h) {
  const uint32_t e = h & 0x7C00;
  return e == 0x7C00 ? (h & 0x8000) << 16 | 0x7F800000 | (h & 0x3FF) << 13 : bits((float)wide(h, 5, 10));
}
static uint32_t mul_rn_bf16x2(uint32_t a, uint32_t b) {
  return halves(a, b, [](uint32_t x, uint32_t y) { return bf16((double)cast<float>(x << 16) * (double)cast<float>(y << 16)); });
}
static uint32_t max_NaN_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
  return halves(a, b, [](uint32_t x, uint32_t y) {
    const uint32_t most = max(x & 0x7FFF, y & 0x7FFF);
    return most > 0x7F80 ? 0x7FFF : most | ((x ^ y) & 0x8000);
  });
}
static uint32_t min_xorsign_abs_f16x2(uint32_t a, uint32_t b) {  // of numbers
  return halves(a, b, [](uint32_t x, uint32_t y) { return min(x & 0x7FFF, y & 0x7FFF) | ((x ^ y) & 0x8000); });
}
