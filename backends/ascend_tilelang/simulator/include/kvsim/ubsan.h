// Entry points that GCC's undefined-behaviour checks call. Defined here instead of linking the sanitizer's library, so
// that a finding becomes a fault of the launch with its block and thread, rather than a message and an abort.
#pragma once
#include "kvsim/machine.h"

namespace kvsim {
struct SourceLocation {
  const char *file;
  uint32_t line, column;
};
} // namespace kvsim

#define KVSIM_UBSAN(NAME, TEXT)                                                                                        \
  extern "C" __attribute__((visibility("hidden"), used)) void __ubsan_handle_##NAME##_abort(void *site, ...) {         \
    KVSIM_FAULT("%s (line %u of the translated source)", TEXT, static_cast<kvsim::SourceLocation *>(site)->line);      \
  }
KVSIM_UBSAN(add_overflow, "signed addition overflows")
KVSIM_UBSAN(sub_overflow, "signed subtraction overflows")
KVSIM_UBSAN(mul_overflow, "signed multiplication overflows")
KVSIM_UBSAN(negate_overflow, "signed negation overflows")
KVSIM_UBSAN(divrem_overflow, "division by zero, or a quotient that overflows")
KVSIM_UBSAN(shift_out_of_bounds, "shift count out of range")
KVSIM_UBSAN(out_of_bounds, "index outside a local array")
KVSIM_UBSAN(float_cast_overflow, "float value outside the range of the integer type")
KVSIM_UBSAN(load_invalid_value, "invalid bool or enum value")
KVSIM_UBSAN(type_mismatch_v1, "invalid or misaligned local address")
KVSIM_UBSAN(pointer_overflow, "local pointer arithmetic overflows")
extern "C" __attribute__((visibility("hidden"), used)) void __ubsan_handle_builtin_unreachable(void *) {
  KVSIM_FAULT("unreachable code reached");
}
