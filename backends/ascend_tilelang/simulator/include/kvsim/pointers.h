// Checked pointers. The translator turns `__gm__ T*` and `__ubuf__ T*` of the generated source into these classes, so
// that every access through them, whatever its width, is checked before it happens.
#pragma once
#include "kvsim/machine.h"

namespace kvsim {

// The compiler may assume nothing about wild addresses, so offsets are added to the integer value.
template <class T> inline T *offset(T *p, int64_t n) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(p) + uintptr_t(n) * sizeof(T));
}

template <class T> struct gm_ptr {
  T *address;
  Extent *extent;

  gm_ptr() = default;
  gm_ptr(T *a, Extent *e) : address(a), extent(e) {}
  template <class U> explicit gm_ptr(gm_ptr<U> o) : address(reinterpret_cast<T *>(o.address)), extent(o.extent) {}
  // `&x[i]` yields a plain pointer; DMA and atomics take those, so the argument is looked up by address.
  template <class U> explicit gm_ptr(U *a) : address(reinterpret_cast<T *>(a)), extent(launch->runtime->find(a)) {}

  void guard(uint64_t bytes) const {
    uint64_t at = uint64_t(reinterpret_cast<uint8_t *>(address) - extent->run_begin);
    if (__builtin_expect(at >= extent->run_bytes || extent->run_bytes - at < bytes, 0))
      launch->runtime->check(extent, address, uint32_t(bytes));
  }
  T &operator*() const {
    guard(sizeof(T));
    // Wide accesses fault on the device when misaligned; here they would silently work.
    if (__builtin_expect(reinterpret_cast<uintptr_t>(address) % alignof(T) != 0, 0))
      KVSIM_FAULT("misaligned access of %d bytes to argument '%s'", int(sizeof(T)), extent->name);
    return *address;
  }
  T &operator[](int64_t i) const { return *(*this + i); }
  gm_ptr operator+(int64_t i) const { return {offset(address, i), extent}; }
};

template <class T> struct ub_ptr {
  uint64_t at; // byte address inside the core's unified buffer, as the generated code spells it

  ub_ptr() = default;
  explicit ub_ptr(uint64_t a) : at(a) {}
  explicit ub_ptr(int a) : at(uint64_t(a)) {}
  template <class U> explicit ub_ptr(ub_ptr<U> o) : at(o.at) {}
  template <class U> explicit ub_ptr(U *a) : at(uint64_t(reinterpret_cast<uint8_t *>(a) - launch->unified_buffer)) {}

  uint8_t *guard(uint64_t bytes) const {
    if (__builtin_expect(at >= kUnifiedBufferBytes || kUnifiedBufferBytes - at < bytes, 0))
      KVSIM_FAULT("access of %lld bytes at %lld, outside the unified buffer", (long long)bytes, (long long)at);
    if (at + bytes > *launch->unified_buffer_used) *launch->unified_buffer_used = at + bytes;
    return launch->unified_buffer + at;
  }
  T &operator*() const {
    uint8_t *p = guard(sizeof(T));
    if (__builtin_expect(at % alignof(T) != 0, 0))
      KVSIM_FAULT("misaligned access of %d bytes at %lld of the unified buffer", int(sizeof(T)), (long long)at);
    return *reinterpret_cast<T *>(p);
  }
  T &operator[](int64_t i) const { return *(*this + i); }
  ub_ptr operator+(int64_t i) const { return ub_ptr(at + uint64_t(i) * sizeof(T)); }
};

} // namespace kvsim
