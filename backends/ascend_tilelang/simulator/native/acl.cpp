// The part of libascendcl that TileLang's Ascend runtime module calls, and the interface that Python uses beside it.
//
// A simulated "device binary" is only a marker with a key; Python has announced before under which path the kernel of
// that key lies. A real driver would refuse the marker, and this library refuses everything else, so neither can mistake
// the other's binaries.
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <string>

#include "runtime.h"

namespace kvsim {

Launch current;

namespace {

constexpr char kMarker[] = "kvhal-ascend-simulation:";
std::map<std::string, std::string> announced;
std::string last_error;

struct Fault {
  bool raised = false;
  int64_t block = 0;
  Dim3 thread{};
  std::string text;
} last_fault;
jmp_buf abort_launch;

uint8_t unified_buffer[kUnifiedBufferBytes] __attribute__((aligned(512)));
uint64_t unified_buffer_used = kUnifiedBufferBytes;
constexpr int kPoison = 0xA5;

void describe(const Extent *e, char *text, size_t size) {
  size_t used = size_t(snprintf(text, size, "argument '%s' (", e->name));
  for (int i = 0; i < e->levels && used < size; ++i)
    used += size_t(snprintf(text + used, size - used, "%lld x %lld bytes apart, ", (long long)e->count[i],
                            (long long)e->stride[i]));
  if (used < size) snprintf(text + used, size - used, "runs of %llu bytes)", (unsigned long long)e->run_bytes);
}

// Full check of one access; see Extent. Leaves the run that was hit for the fast check of the next access.
void check(Extent *e, const void *address, uint32_t bytes) {
  int64_t rest = static_cast<const uint8_t *>(address) - e->base;
  bool inside = rest >= 0;
  for (int i = 0; inside && i < e->levels; ++i) {
    inside = rest / e->stride[i] < e->count[i];
    rest %= e->stride[i];
  }
  if (inside && uint64_t(rest) + bytes <= e->run_bytes) {
    e->run_begin = const_cast<uint8_t *>(static_cast<const uint8_t *>(address)) - rest;
    return;
  }
  char text[400];
  describe(e, text, sizeof text);
  fault("access of %u bytes at byte offset %lld, outside %s", bytes,
        (long long)(static_cast<const uint8_t *>(address) - e->base), text);
}

// Only reached from `&x[i]`, which has been checked as an access to `x`, so that some argument does own the address.
Extent *find(const void *address) {
  for (int i = 0; i < current.extents; ++i) {
    Extent *e = &current.extent[i];
    int64_t rest = static_cast<const uint8_t *>(address) - e->base;
    bool inside = rest >= 0;
    for (int k = 0; inside && k < e->levels; ++k) {
      inside = rest / e->stride[k] < e->count[k];
      rest %= e->stride[k];
    }
    if (inside && uint64_t(rest) < e->run_bytes) return e;
  }
  fault("address outside every argument");
}

void enter_block(uint32_t step) {
  memset(unified_buffer, kPoison, unified_buffer_used);
  unified_buffer_used = 0;
  current.machine->block = block_at(step, current.blocks);
  current.machine->blocks = current.blocks;
  current.machine->thread = {0, 0, 0};
}

const Runtime runtime = {fault, check, find, enter_block, thread_order, run_threads, barrier};

} // namespace

void fault(const char *format, ...) {
  char text[700];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  last_fault.raised = true;
  last_fault.text = text;
  if (current.machine) {
    last_fault.block = current.machine->block;
    last_fault.thread = current.machine->thread;
  }
  _longjmp(abort_launch, 1);
}

} // namespace kvsim

using namespace kvsim;

extern "C" {

// --- called by Python ------------------------------------------------------------------------------------------------

void kvsim_announce(const char *key, const char *path) { announced[key] = path; }

void kvsim_prepare(Extent *extents, int32_t count, int32_t schedule, uint32_t seed) {
  current = Launch{};
  current.extent = extents;
  current.extents = count;
  set_schedule(Schedule(schedule), seed);
  last_fault = Fault{};
}

// 1 and the fault of the last launch, or 0 when it had none.
int32_t kvsim_fault(int64_t *block, uint32_t *thread, char *text, uint64_t size) {
  *block = last_fault.block;
  thread[0] = last_fault.thread.x;
  thread[1] = last_fault.thread.y;
  thread[2] = last_fault.thread.z;
  snprintf(text, size, "%s", last_fault.text.c_str());
  return last_fault.raised;
}

// --- called by TileLang's runtime module -----------------------------------------------------------------------------

int32_t aclrtGetDevice(int32_t *device) {
  *device = 0;
  return 0;
}

int32_t aclrtBinaryLoadFromData(const void *data, size_t bytes, const void *, void **handle) {
  std::string text(static_cast<const char *>(data), bytes);
  if (text.compare(0, sizeof kMarker - 1, kMarker) != 0) {
    last_error = "this process simulates Ascend and cannot load a real device binary";
    return 1;
  }
  auto found = announced.find(text.substr(sizeof kMarker - 1));
  if (found == announced.end()) {
    last_error = "unknown simulated kernel " + text;
    return 1;
  }
  *handle = dlopen(found->second.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (*handle == nullptr) last_error = dlerror();
  return *handle == nullptr;
}

int32_t aclrtBinaryGetFunction(void *handle, const char *name, void **function) {
  *function = dlsym(handle, (std::string("kvsim_entry_") + name).c_str());
  if (*function == nullptr) last_error = dlerror();
  return *function == nullptr;
}

int32_t aclrtBinaryUnLoad(void *handle) { return dlclose(handle); }

int32_t aclrtLaunchKernelWithHostArgs(void *function, uint32_t blocks, void *, void *, void *arguments, size_t bytes,
                                      void *, size_t) {
  current.runtime = &runtime;
  current.packed = static_cast<const uint8_t *>(arguments);
  current.packed_bytes = bytes;
  current.blocks = blocks;
  current.unified_buffer = unified_buffer;
  current.unified_buffer_used = &unified_buffer_used;
  if (_setjmp(abort_launch) == 0) {
    reinterpret_cast<void (*)(Launch *)>(function)(&current);
    return 0;
  }
  abandon_fibres();
  last_error = last_fault.text;
  return 507000;
}

const char *aclGetRecentErrMsg() { return last_error.c_str(); }
}
