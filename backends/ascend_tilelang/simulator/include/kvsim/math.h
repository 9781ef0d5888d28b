// Mathematical functions. Declared rather than included: <cmath> alone would double the compile time of a kernel.
#pragma once
#include <stdint.h>

extern "C" {
float sqrtf(float) noexcept;
float fabsf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float truncf(float) noexcept;
float roundf(float) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
int abs(int) noexcept;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
#define KVSIM_MIN_MAX(T)                                                                                               \
  inline T max(T a, T b) { return a > b ? a : b; }                                                                     \
  inline T min(T a, T b) { return a < b ? a : b; }
KVSIM_MIN_MAX(int8_t)
KVSIM_MIN_MAX(uint8_t)
KVSIM_MIN_MAX(int16_t)
KVSIM_MIN_MAX(uint16_t)
KVSIM_MIN_MAX(int32_t)
KVSIM_MIN_MAX(uint32_t)
KVSIM_MIN_MAX(int64_t)
KVSIM_MIN_MAX(uint64_t)
