// What the runtime library and every simulated kernel agree on. Both sides include this file, and its text is part of
// the cache key, so a kernel built against another version of it is never loaded.
#pragma once
#include <stdint.h>

namespace kvsim {

struct Dim3 {
  uint32_t x, y, z;
};

// The legal bytes of one kernel argument. An argument owns exactly the bytes that its shape and strides address: a view
// of the data part of a token record does not own the scale bytes that follow, although they lie inside its span.
// Python reduces shape and strides to nested levels (outermost first) above one contiguous run.
constexpr int kMaxLevels = 6;
struct Extent {
  const char *name;
  uint8_t *base;
  // The contiguous run that the previous access fell into. Neighbouring accesses nearly always hit it again, which
  // keeps the divisions of the full check off the hot path.
  uint8_t *run_begin;
  uint64_t run_bytes;
  int32_t levels;
  int32_t reserved;
  int64_t count[kMaxLevels];
  int64_t stride[kMaxLevels]; // bytes
};

enum class Scope : int32_t { block, warp };
constexpr uint32_t kWarp = 32;
constexpr uint32_t kMaxThreads = 2048;
constexpr uint64_t kUnifiedBufferBytes = 256 * 1024;

// Per-thread registers that the generated code reads. One instance lives in each kernel, so that the compiler can keep
// the fields in registers in kernels that never switch threads.
struct Machine {
  Dim3 thread, block_dim;
  int64_t block, blocks;
};

// Services of the runtime library. A table rather than linked symbols: kernels then need no link-time dependency and
// cannot bind to another library that exports the same names.
struct Runtime {
  void (*fault)(const char *format, ...); // does not return
  void (*check)(Extent *, const void *address, uint32_t bytes);
  Extent *(*find)(const void *address);
  void (*enter_block)(uint32_t step);
  const uint16_t *(*thread_order)(uint32_t threads);
  void (*run_threads)(uint32_t threads, void (*body)(void *), void *context);
  void (*barrier)(Scope, int32_t site);
};

struct Launch {
  const Runtime *runtime;
  Machine *machine; // filled in by the kernel
  const uint8_t *packed;
  uint64_t packed_bytes;
  uint32_t blocks;
  int32_t extents;
  Extent *extent;
  uint8_t *unified_buffer;
  uint64_t *unified_buffer_used; // highest byte touched, so that only this much is poisoned again
};

} // namespace kvsim
