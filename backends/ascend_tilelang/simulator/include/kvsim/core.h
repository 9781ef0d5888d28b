// Core-level C API outside SIMT regions: one in-order pipe, so that every synchronisation between pipes is satisfied by
// construction. Errors in pipe synchronisation are therefore not found here.
#pragma once
#include "kvsim/pointers.h"

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
enum asc_load_l2_cache_mode {};
enum asc_store_l2_cache_mode {};
inline void asc_init() {}
inline void asc_sync() {}
inline void asc_sync_notify(pipe_t, pipe_t, event_t) {}
inline void asc_sync_wait(pipe_t, pipe_t, event_t) {}
inline void asc_sync_pipe(pipe_t) {}

namespace kvsim {
static uint64_t pad_value;

inline void require_aligned(uint64_t at, const char *what) {
  if (at % 32 != 0) KVSIM_FAULT("%s: unified buffer address %lld is not 32-byte aligned", what, (long long)at);
}
} // namespace kvsim
template <class T> void asc_set_copy_pad_val(T value) {
  kvsim::pad_value = 0;
  __builtin_memcpy(&kvsim::pad_value, &value, sizeof value);
}

// Strides are start-to-start bytes. With one burst, or a destination stride equal to the burst length, rows are packed
// and the tail is padded to 32 bytes once; otherwise every row is padded, with the pad value when one is requested and
// with the row's first element when not.
template <class T>
void asc_copy_gm2ub_align(kvsim::ub_ptr<T> dst, kvsim::gm_ptr<T> src, uint32_t rows, uint32_t bytes, uint32_t left,
                          uint32_t right, bool constant_pad, asc_load_l2_cache_mode, uint64_t src_stride,
                          uint32_t dst_stride) {
  kvsim::require_aligned(dst.at, "gm2ub");
  if (bytes % sizeof(T)) KVSIM_FAULT("gm2ub: a burst of %u bytes is not a multiple of the element size", bytes);
  bool packed = rows == 1 || dst_stride == bytes;
  if (!packed) kvsim::require_aligned(dst_stride, "gm2ub row stride");
  for (uint32_t row = 0; row < rows; ++row) {
    kvsim::gm_ptr<uint8_t> from{reinterpret_cast<uint8_t *>(src.address) + row * src_stride, src.extent};
    uint64_t start = row * uint64_t(dst_stride), body = left * sizeof(T) + bytes;
    uint64_t end = body + right * sizeof(T);
    if (!packed || row + 1 == rows) end = (start + end + 31) / 32 * 32 - start;
    uint8_t *to = kvsim::ub_ptr<uint8_t>(dst.at + start).guard(end);
    from.guard(bytes);
    T fill;
    if (left || right || constant_pad) __builtin_memcpy(&fill, &kvsim::pad_value, sizeof fill);
    else __builtin_memcpy(&fill, from.address, sizeof fill);
    for (uint64_t i = 0; i < left; ++i) __builtin_memcpy(to + i * sizeof(T), &fill, sizeof fill);
    __builtin_memcpy(to + left * sizeof(T), from.address, bytes);
    for (uint64_t i = body; i + sizeof(T) <= end; i += sizeof(T)) __builtin_memcpy(to + i, &fill, sizeof fill);
  }
}

template <class T>
void asc_copy_ub2gm_align(kvsim::gm_ptr<T> dst, kvsim::ub_ptr<T> src, uint32_t rows, uint32_t bytes,
                          asc_store_l2_cache_mode, uint64_t dst_stride, uint32_t src_stride) {
  kvsim::require_aligned(src.at, "ub2gm");
  if (rows > 1 && src_stride != bytes) kvsim::require_aligned(src_stride, "ub2gm row stride");
  for (uint32_t row = 0; row < rows; ++row) {
    kvsim::gm_ptr<uint8_t> to{reinterpret_cast<uint8_t *>(dst.address) + row * dst_stride, dst.extent};
    to.guard(bytes);
    __builtin_memcpy(to.address, kvsim::ub_ptr<uint8_t>(src.at + row * uint64_t(src_stride)).guard(bytes), bytes);
  }
}
