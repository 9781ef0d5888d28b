// SIMT regions: launching threads, barriers, warp shuffles and reductions.
#pragma once
#include "kvsim/machine.h"

namespace cce {
struct dim3 {
  uint32_t x, y, z;
  constexpr dim3(uint32_t a, uint32_t b = 1, uint32_t c = 1) : x(a), y(b), z(c) {}
};
} // namespace cce

namespace kvsim {
inline uint32_t linear_thread() {
  return machine.thread.x + machine.block_dim.x * (machine.thread.y + machine.block_dim.y * machine.thread.z);
}
inline void set_thread(uint32_t t) {
  const Dim3 &d = machine.block_dim;
  machine.thread = {t % d.x, t / d.x % d.y, t / (d.x * d.y)};
}
} // namespace kvsim

#if KVSIM_COOPERATIVE
// Threads of a cooperative region run on fibres, which the runtime library schedules.
template <auto F, class... A> void asc_vf_call(cce::dim3 d, A... args) {
  kvsim::machine.block_dim = {d.x, d.y, d.z};
  auto body = [&] { F(args...); };
  kvsim::launch->runtime->run_threads(
      d.x * d.y * d.z, [](void *context) { (*static_cast<decltype(body) *>(context))(); }, &body);
}

// The call site travels along, so that a barrier reached from two places at once is recognised as divergent.
inline void asc_syncthreads(int site = __builtin_LINE()) {
  kvsim::launch->runtime->barrier(kvsim::Scope::block, site);
}

namespace kvsim {
static uint64_t mailbox[kMaxThreads];

// Two warp barriers around the exchange: the second keeps a fast lane from overwriting what a slow one has yet to read.
template <class T, class F> T through_mailbox(T value, int site, F combine) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint32_t self = linear_thread();
  mailbox[self] = 0;
  __builtin_memcpy(&mailbox[self], &value, sizeof value);
  launch->runtime->barrier(Scope::warp, site);
  T result = combine(self & ~(kWarp - 1));
  launch->runtime->barrier(Scope::warp, site);
  return result;
}
template <class T> T letter(uint32_t thread) {
  T value;
  __builtin_memcpy(&value, &mailbox[thread], sizeof value);
  return value;
}
template <class T, class F> T warp_reduce(T value, int site, F op) {
  return through_mailbox(value, site, [&](uint32_t base) {
    uint32_t threads = machine.block_dim.x * machine.block_dim.y * machine.block_dim.z;
    T result = letter<T>(base);
    for (uint32_t lane = 1; lane < kWarp && base + lane < threads; ++lane) result = op(result, letter<T>(base + lane));
    return result;
  });
}
} // namespace kvsim

template <class T> T asc_shfl_xor(T value, int mask, int = 32, int site = __builtin_LINE()) {
  uint32_t source = (kvsim::linear_thread() ^ uint32_t(mask)) & 31;
  return kvsim::through_mailbox(value, site, [=](uint32_t base) { return kvsim::letter<T>(base | source); });
}
template <class T> T asc_shfl(T value, int lane, int = 32, int site = __builtin_LINE()) {
  return kvsim::through_mailbox(value, site, [=](uint32_t base) { return kvsim::letter<T>(base | (lane & 31)); });
}
template <class T> T asc_reduce_add(T v, int site = __builtin_LINE()) {
  return kvsim::warp_reduce(v, site, [](T a, T b) { return T(a + b); });
}
template <class T> T asc_reduce_max(T v, int site = __builtin_LINE()) {
  return kvsim::warp_reduce(v, site, [](T a, T b) { return a > b ? a : b; });
}
template <class T> T asc_reduce_min(T v, int site = __builtin_LINE()) {
  return kvsim::warp_reduce(v, site, [](T a, T b) { return a < b ? a : b; });
}
#else
// No thread of this kernel ever waits for another, so a loop over the threads is a faithful execution and the fastest.
template <auto F, class... A> void asc_vf_call(cce::dim3 d, A... args) {
  uint32_t threads = d.x * d.y * d.z;
  kvsim::machine.block_dim = {d.x, d.y, d.z};
  const uint16_t *order = kvsim::launch->runtime->thread_order(threads);
  for (uint32_t i = 0; i < threads; ++i) {
    kvsim::set_thread(order[i]);
    F(args...);
  }
  kvsim::machine.thread = {0, 0, 0};
}
#endif

inline void asc_threadfence() {}
template <class T> T asc_atomic_add(T *address, T value) {
  T old = *address;
  *address = T(old + value);
  return old;
}
