// Internal to the runtime library: the state of the launch in progress and the two ways of running its threads.
#pragma once
#include <cstdarg>
#include <cstdint>

#include "kvsim/abi.h"

namespace kvsim {

enum class Schedule : int32_t { forward, reverse, shuffle };

// One launch at a time: Python holds a lock around each.
extern Launch current;

[[noreturn]] void fault(const char *format, ...);

// fibres.cpp
void run_threads(uint32_t threads, void (*body)(void *), void *context);
void barrier(Scope scope, int32_t site);
void abandon_fibres(); // after a fault: their stacks hold half-executed threads

// order.cpp
void set_schedule(Schedule schedule, uint32_t seed);
const uint16_t *thread_order(uint32_t threads);
uint32_t block_at(uint32_t step, uint32_t blocks);

} // namespace kvsim
