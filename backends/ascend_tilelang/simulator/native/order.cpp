// The order in which blocks and threads run. The device promises none; running the same kernel in several orders turns
// a missing barrier, or a result that depends on the order, into a difference that a test sees.
#include "runtime.h"

namespace kvsim {
namespace {

Schedule schedule = Schedule::forward;
uint32_t seed = 0;
uint16_t order[kMaxThreads];
uint32_t ordered = 0; // how many threads `order` is made for; 0 when stale

uint32_t next_random(uint32_t &state) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

} // namespace

void set_schedule(Schedule s, uint32_t new_seed) {
  schedule = s;
  seed = new_seed;
  ordered = 0;
}

const uint16_t *thread_order(uint32_t threads) {
  if (threads == 0 || threads > kMaxThreads) fault("a SIMT region of %u threads", threads);
  if (ordered == threads) return order;
  for (uint32_t i = 0; i < threads; ++i) order[i] = uint16_t(schedule == Schedule::reverse ? threads - 1 - i : i);
  if (schedule == Schedule::shuffle) {
    uint32_t state = seed;
    for (uint32_t i = threads; i > 1; --i) {
      uint32_t j = next_random(state) % i;
      uint16_t kept = order[i - 1];
      order[i - 1] = order[j];
      order[j] = kept;
    }
  }
  ordered = threads;
  return order;
}

uint32_t block_at(uint32_t step, uint32_t blocks) {
  if (schedule == Schedule::forward) return step;
  if (schedule == Schedule::reverse) return blocks - 1 - step;
  // An odd multiplier permutes a power-of-two range; walking the cycle until it falls below `blocks` permutes any range.
  uint32_t range = 1;
  while (range < blocks) range *= 2;
  uint32_t at = step;
  do {
    at = (at * 5 + (seed | 1)) & (range - 1);
  } while (at >= blocks);
  return at;
}

} // namespace kvsim
