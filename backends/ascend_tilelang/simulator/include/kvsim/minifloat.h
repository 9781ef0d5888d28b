// Conversions between fp32 and the narrow float formats, in integer arithmetic: exact, no libm, the same on every host.
#pragma once
#include <stdint.h>

namespace kvsim {

inline uint32_t float_bits(float f) { return __builtin_bit_cast(uint32_t, f); }
inline float bits_float(uint32_t u) { return __builtin_bit_cast(float, u); }

inline uint16_t bf16_from_float(float f) {
  uint32_t u = float_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// E exponent and M mantissa bits. `kInfinity`: the top exponent means infinity and NaN (as in IEEE formats); otherwise
// only the all-ones code is a NaN (as in e4m3fn).
template <int E, int M, bool kInfinity> struct Minifloat {
  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr uint32_t kSign = 1u << (E + M);
  static constexpr uint32_t kTop = ((1u << E) - 1) << M;
  static constexpr uint32_t kNaN = kInfinity ? kTop | (1u << (M - 1)) : kTop | ((1u << M) - 1);
  static constexpr uint32_t kLargest = kInfinity ? kTop - 1 : kNaN - 1;

  static float decode(uint32_t v) {
    uint32_t sign = (v & kSign) << (31 - E - M), magnitude = v & (kSign - 1), mantissa = v & ((1u << M) - 1);
    if (kInfinity ? magnitude > kTop : magnitude == kNaN) return bits_float(sign | 0x7fc00000u);
    if (kInfinity && magnitude == kTop) return bits_float(sign | 0x7f800000u);
    if (magnitude < (1u << M)) { // subnormal: mantissa * 2^(1 - bias - M), exact in fp32
      float value = float(int32_t(mantissa)) * bits_float(uint32_t(127 + 1 - kBias - M) << 23);
      return bits_float(float_bits(value) | sign);
    }
    return bits_float(sign | (uint32_t((magnitude >> M) + 127 - kBias) << 23) | (mantissa << (23 - M)));
  }

  static uint32_t encode(float f, bool saturate, bool nan_to_zero) {
    uint32_t u = float_bits(f), sign = (u >> 31) << (E + M), magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return nan_to_zero ? 0 : sign | kNaN;
    if (magnitude == 0x7f800000u) return sign | (saturate ? kLargest : kInfinity ? kTop : kNaN);
    int exponent = int(magnitude >> 23) - 127 + kBias;
    uint32_t significand = (magnitude & 0x7fffffu) | (magnitude >> 23 ? 0x800000u : 0);
    int drop = 23 - M + (exponent < 1 ? 1 - exponent : 0);
    if (drop > 25) return sign; // below half of the smallest subnormal
    uint32_t kept = significand >> drop, rest = significand & ((1u << drop) - 1), half = 1u << (drop - 1);
    kept += rest > half || (rest == half && (kept & 1));
    // A carry out of the mantissa lands in the exponent field, which is the right code.
    uint32_t code = exponent < 1 ? kept : kept + (uint32_t(exponent - 1) << M);
    return sign | (code > kLargest ? (saturate ? kLargest : kInfinity ? kTop : kNaN) : code);
  }
};
using E4M3 = Minifloat<4, 3, false>;
using E5M2 = Minifloat<5, 2, true>;
using Half = Minifloat<5, 10, true>;

} // namespace kvsim
