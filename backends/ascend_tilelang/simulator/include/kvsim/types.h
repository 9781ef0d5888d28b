// Scalar and short-vector types of the device language, and the conversions that the generated code calls.
#pragma once
#include "kvsim/minifloat.h"

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float f) : bits(kvsim::bf16_from_float(f)) {}
  operator float() const { return kvsim::bits_float(uint32_t(bits) << 16); }
};
struct half {
  uint16_t bits;
  half() = default;
  half(float f) : bits(uint16_t(kvsim::Half::encode(f, false, false))) {}
  operator float() const { return kvsim::Half::decode(bits); }
};
struct float8_e4m3_t {
  uint8_t data;
  float8_e4m3_t() = default;
  // Stores into an fp8 buffer go through TileLang's own tl::float_e4m3_t, which has this member.
  template <class T>
    requires requires(T t) { t.data; }
  float8_e4m3_t(T t) : data(t.data) {}
  operator float() const { return kvsim::E4M3::decode(data); }
};
struct float8_e4m3x2_t {
  uint8_t x, y;
};
struct float8_e5m2x2_t {
  uint8_t x, y;
};
struct alignas(4) bfloat16x2_t {
  bfloat16_t x, y;
};
struct alignas(4) half2 {
  half x, y;
};
struct uint1 {
  uint32_t x;
};

#define KVSIM_VECTOR2(NAME, T)                                                                                         \
  struct alignas(2 * sizeof(T)) NAME##2 {                                                                              \
    T x, y;                                                                                                            \
  };                                                                                                                   \
  inline NAME##2 make_##NAME##2(T a, T b) { return {a, b}; }
#define KVSIM_VECTOR4(NAME, T)                                                                                         \
  struct alignas(4 * sizeof(T)) NAME##4 {                                                                              \
    T x, y, z, w;                                                                                                      \
  };                                                                                                                   \
  inline NAME##4 make_##NAME##4(T a, T b, T c, T d) { return {a, b, c, d}; }
#define KVSIM_LANEWISE(NAME, OP)                                                                                       \
  inline NAME##2 operator OP(NAME##2 a, NAME##2 b) {                                                                   \
    return {decltype(a.x)(a.x OP b.x), decltype(a.x)(a.y OP b.y)};                                                     \
  }                                                                                                                    \
  inline NAME##4 operator OP(NAME##4 a, NAME##4 b) {                                                                   \
    using T = decltype(a.x);                                                                                           \
    return {T(a.x OP b.x), T(a.y OP b.y), T(a.z OP b.z), T(a.w OP b.w)};                                               \
  }
#define KVSIM_ARITHMETIC(NAME) KVSIM_LANEWISE(NAME, +) KVSIM_LANEWISE(NAME, -) KVSIM_LANEWISE(NAME, *)
#define KVSIM_BITWISE(NAME)                                                                                            \
  KVSIM_LANEWISE(NAME, &)                                                                                              \
  KVSIM_LANEWISE(NAME, |) KVSIM_LANEWISE(NAME, ^) KVSIM_LANEWISE(NAME, <<) KVSIM_LANEWISE(NAME, >>)
KVSIM_VECTOR2(float, float)
KVSIM_VECTOR4(float, float)
KVSIM_VECTOR2(int, int32_t)
KVSIM_VECTOR4(int, int32_t)
KVSIM_VECTOR2(uint, uint32_t)
KVSIM_VECTOR4(uint, uint32_t)
KVSIM_VECTOR2(ushort, uint16_t)
KVSIM_VECTOR4(ushort, uint16_t)
KVSIM_ARITHMETIC(float)
KVSIM_ARITHMETIC(int)
KVSIM_ARITHMETIC(uint)
KVSIM_BITWISE(int)
KVSIM_BITWISE(uint)

inline float2 __e4m3x22float2(float8_e4m3x2_t v) { return {kvsim::E4M3::decode(v.x), kvsim::E4M3::decode(v.y)}; }
inline float2 __e5m2x22float2(float8_e5m2x2_t v) { return {kvsim::E5M2::decode(v.x), kvsim::E5M2::decode(v.y)}; }
inline float2 __bfloat1622float2(bfloat16x2_t v) { return {float(v.x), float(v.y)}; }
inline float2 __half22float2(half2 v) { return {float(v.x), float(v.y)}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline half2 __float22half2_rn(float2 v) { return {half(v.x), half(v.y)}; }
inline bfloat16_t __float2bfloat16_rn(float f) { return bfloat16_t(f); }
inline float __bfloat162float(bfloat16_t v) { return float(v); }
inline half __float2half_rn(float f) { return half(f); }

using __asc_fp8x2_storage_t = uint16_t;
enum __asc_saturation_t { __ASC_NOSAT, __ASC_SATFINITE };
enum __asc_fp8_interpretation_t { __ASC_E4M3, __ASC_E5M2 };
// The device turns NaN into zero in the saturating mode unless a control bit is set; its reset value is modelled.
inline __asc_fp8x2_storage_t __asc_cvt_float2_to_fp8x2(float2 v, __asc_saturation_t s, __asc_fp8_interpretation_t k) {
  bool saturate = s == __ASC_SATFINITE;
  auto encode = [=](float f) {
    return k == __ASC_E4M3 ? kvsim::E4M3::encode(f, saturate, saturate) : kvsim::E5M2::encode(f, saturate, saturate);
  };
  return uint16_t(encode(v.x) | encode(v.y) << 8);
}
template <class T> inline uint16_t make_fp8_e4_2_t(T a, T b) { return uint16_t(a.data | b.data << 8); }
template <class T> inline uint32_t make_fp8_e4_4_t(T a, T b, T c, T d) {
  return a.data | b.data << 8 | c.data << 16 | uint32_t(d.data) << 24;
}
