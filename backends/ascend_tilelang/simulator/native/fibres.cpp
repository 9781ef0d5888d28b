// Threads of one SIMT region as fibres on the calling thread.
//
// A fibre runs one simulated thread after another until one of them has to wait; only then is a further fibre needed.
// ucontext starts a fibre on its stack. Later switches use _setjmp and _longjmp, because swapcontext makes a system call
// each time and kernels with many barriers would spend most of their time in it.
#include <csetjmp>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#include "runtime.h"

namespace kvsim {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kPage = 4096;

struct Fibre {
  jmp_buf resume;
  ucontext_t boot;
  char *stack = nullptr;
  Dim3 thread{};
  uint32_t linear = 0;
  int32_t site = 0;
  Scope scope = Scope::block;
  bool waiting = false, booted = false;
};

std::vector<Fibre *> pool;
Fibre *active = nullptr;
jmp_buf scheduler;

struct Region {
  void (*body)(void *);
  void *context;
  const uint16_t *order;
  uint32_t threads, started, alive, at_block_barrier;
  uint32_t warp_alive[kMaxThreads / kWarp], warp_waiting[kMaxThreads / kWarp];
} region;

void suspend() {
  if (_setjmp(active->resume) == 0) _longjmp(scheduler, 1);
}

void fibre_main() {
  for (;;) {
    while (region.started < region.threads) {
      uint32_t t = region.order[region.started++];
      Dim3 d = current.machine->block_dim;
      current.machine->thread = active->thread = {t % d.x, t / d.x % d.y, t / (d.x * d.y)};
      active->linear = t;
      region.body(region.context);
      --region.alive;
      --region.warp_alive[active->linear / kWarp];
    }
    suspend();
  }
}

Fibre *take(size_t index) {
  if (index == pool.size()) {
    Fibre *f = new Fibre();
    void *memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fault("no memory for the stack of a simulated thread");
    f->stack = static_cast<char *>(memory);
    mprotect(memory, kPage, PROT_NONE); // an overflow must not run into the neighbour's stack
    pool.push_back(f);
  }
  return pool[index];
}

void resume(Fibre *f) {
  active = f;
  f->waiting = false;
  if (_setjmp(scheduler) == 0) {
    if (f->booted) {
      current.machine->thread = f->thread;
      _longjmp(f->resume, 1);
    }
    f->booted = true;
    getcontext(&f->boot);
    f->boot.uc_stack.ss_sp = f->stack;
    f->boot.uc_stack.ss_size = kStackBytes;
    f->boot.uc_link = nullptr;
    makecontext(&f->boot, fibre_main, 0);
    setcontext(&f->boot);
  }
  active = nullptr;
}

// Resumes every fibre that waits at the given barrier. The list is taken first: a resumed fibre may wait again at once.
void release(Scope scope, uint32_t warp, size_t used) {
  std::vector<Fibre *> ready;
  for (size_t i = 0; i < used; ++i) {
    Fibre *f = pool[i];
    if (!f->waiting || f->scope != scope || (scope == Scope::warp && f->linear / kWarp != warp)) continue;
    if (!ready.empty() && ready[0]->site != f->site) {
      current.machine->thread = f->thread;
      fault("divergent barrier: this thread waits at line %d, thread %u at line %d", f->site, ready[0]->linear,
            ready[0]->site);
    }
    ready.push_back(f);
  }
  for (Fibre *f : ready) resume(f);
}

bool release_warps(size_t used) {
  bool progress = false;
  for (uint32_t w = 0; w * kWarp < region.threads; ++w) {
    if (region.warp_waiting[w] == 0 || region.warp_waiting[w] != region.warp_alive[w]) continue;
    region.warp_waiting[w] = 0;
    release(Scope::warp, w, used);
    progress = true;
  }
  return progress;
}

void start_region(uint32_t threads, void (*body)(void *), void *context) {
  region = Region{};
  region.body = body;
  region.context = context;
  region.order = thread_order(threads);
  region.threads = region.alive = threads;
  for (uint32_t t = 0; t < threads; ++t) ++region.warp_alive[t / kWarp];
}

} // namespace

void barrier(Scope scope, int32_t site) {
  if (scope == Scope::block) ++region.at_block_barrier;
  else ++region.warp_waiting[active->linear / kWarp];
  active->scope = scope;
  active->site = site;
  active->waiting = true;
  suspend();
}

void run_threads(uint32_t threads, void (*body)(void *), void *context) {
  start_region(threads, body, context);
  size_t used = 0;
  while (region.alive) {
    if (region.started < region.threads) {
      Fibre *f = take(used++);
      resume(f);
      continue;
    }
    if (release_warps(used)) continue;
    // A thread that has returned can never arrive, so a barrier after an early return is an error, not a smaller barrier.
    if (region.at_block_barrier != region.threads)
      fault("divergent barrier: %u of %u threads wait for the block, %u have returned", region.at_block_barrier,
            region.threads, region.threads - region.alive);
    region.at_block_barrier = 0;
    release(Scope::block, 0, used);
  }
  current.machine->thread = {0, 0, 0};
}

void abandon_fibres() {
  active = nullptr;
  for (Fibre *f : pool) f->booted = f->waiting = false;
}

} // namespace kvsim
