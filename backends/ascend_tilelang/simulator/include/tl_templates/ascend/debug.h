// Stands in for TileLang's debug.h: a failed device assertion ends the launch. T.print is not simulated.
#pragma once
#include "kvsim/machine.h"

#define device_assert(condition)                                                                                       \
  do {                                                                                                                 \
    if (!(condition)) KVSIM_FAULT("device assertion failed: %s", #condition);                                          \
  } while (0)
#define device_assert_with_msg(condition, message)                                                                     \
  do {                                                                                                                 \
    if (!(condition)) KVSIM_FAULT("device assertion failed: %s (%s)", #condition, message);                            \
  } while (0)
