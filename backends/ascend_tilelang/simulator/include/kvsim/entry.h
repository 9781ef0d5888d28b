// Unpacking of launch arguments, in the layout of TileLang's Ascend runtime module: each argument is aligned to its own
// size, and to at least four bytes.
#pragma once
#include "kvsim/pointers.h"

namespace kvsim {

struct ArgumentReader {
  uint64_t at = 0;

  template <class T> T scalar() {
    constexpr uint64_t alignment = sizeof(T) < 4 ? 4 : sizeof(T);
    at = (at + alignment - 1) / alignment * alignment;
    if (at + sizeof(T) > launch->packed_bytes) KVSIM_FAULT("the launch passes fewer arguments than the kernel takes");
    T value;
    __builtin_memcpy(&value, launch->packed + at, sizeof value);
    at += sizeof(T);
    return value;
  }
  template <class T> gm_ptr<T> pointer(int index) {
    T *address = scalar<T *>();
    if (index >= launch->extents || launch->extent[index].base != reinterpret_cast<uint8_t *>(address))
      KVSIM_FAULT("argument %d of the launch is not the tensor that was announced for it", index);
    return {address, &launch->extent[index]};
  }
};

template <class F> inline void for_each_block(F kernel) {
  for (uint32_t step = 0; step < launch->blocks; ++step) {
    launch->runtime->enter_block(step);
    kernel();
  }
}

} // namespace kvsim
