// State of the simulated core inside one kernel, and the fault that ends a launch.
#pragma once
#include "kvsim/abi.h"

namespace kvsim {
static Machine machine;
static Launch *launch;

#define KVSIM_FAULT(...)                                                                                               \
  do {                                                                                                                 \
    ::kvsim::launch->runtime->fault(__VA_ARGS__);                                                                      \
    __builtin_unreachable();                                                                                           \
  } while (0)
} // namespace kvsim

// Names that the generated code uses.
static kvsim::Dim3 &threadIdx = kvsim::machine.thread;
static kvsim::Dim3 &blockDim = kvsim::machine.block_dim;
static int64_t &block_idx = kvsim::machine.block;
static int64_t &block_num = kvsim::machine.blocks;
static constexpr int32_t warpSize = 32;
