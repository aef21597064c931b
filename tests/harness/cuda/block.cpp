#include "block.h"

#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"

namespace harness {

Thread* current = nullptr;
uint3 block_index{};
dim3 grid_dim;

namespace {

constexpr unsigned kWarp = 32, kMostThreads = 1024, kForgotten = 32 << 10;
constexpr size_t kTsanThreads =
    6000;  // thread sanitizer knows 8128; one whose slot is reused counts as having ended before

struct Fiber : Thread {  // a CUDA thread
  Context context;
  unsigned warp = 0, lane = 0;
  bool started = false, done = false, posted = false;  // posted: waits in a shuffle
  uint32_t mask = 0;
  int source = 0;
  uint64_t value = 0, result = 0;
  const char* file = "";  // where it waits
  int line = 0;
};

struct Warp {
  uint32_t ready = 0, exists = 0, done = 0;
};

struct Block {
  unsigned threads = 0, done = 0, arrived = 0;
  int predicate = 0, result = 0;
  std::string error;
  char fence = 0, end = 0, barrier[4096] = {};  // places that thread sanitizer synchronises at
  unsigned number = 0;
};

Context host;
Block running;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
const std::function<void()>* body = nullptr;
char module_anchor = 0;
thread_local char storage_anchor = 0;

Fiber& me() { return *static_cast<Fiber*>(current); }
char* barrier_place() { return &running.barrier[running.number % sizeof(running.barrier)]; }

class Order {
 public:
  Order() {
    const char* wish = std::getenv("GRADACC_HARNESS_ORDER");
    const std::string order = wish ? wish : "asc";
    descending_ = order == "desc";
    shuffled_ = !descending_ && order != "asc";
    if (shuffled_) random_.seed(std::stoul(order));
  }
  unsigned pick(uint32_t lanes) {
    if (descending_) return 31 - std::countl_zero(lanes);
    for (int skip = shuffled_ ? static_cast<int>(random_() % std::popcount(lanes)) : 0; skip > 0; --skip) {
      lanes &= lanes - 1;
    }
    return std::countr_zero(lanes);
  }
  void fill(std::vector<unsigned>& numbers, unsigned count) {
    numbers.resize(count);
    for (unsigned i = 0; i < count; ++i) numbers[i] = descending_ ? count - 1 - i : i;
    if (shuffled_) std::shuffle(numbers.begin(), numbers.end(), random_);
  }

 private:
  bool descending_ = false, shuffled_ = false;
  std::mt19937 random_;
};

// Every participant acquires when the barrier completes, before any of them goes on: later it would see later releases.
HARNESS_RAW void acquire_for(Fiber& fiber, void* place) {
  HARNESS_TSAN(__tsan_switch_to_fiber(fiber.context.tsan, 1); __tsan_acquire(place);
               __tsan_switch_to_fiber(host.tsan, 1);)
  (void)fiber, (void)place;
}

HARNESS_RAW void wait() {
  Fiber& fiber = me();
  warps[fiber.warp].ready &= ~(1u << fiber.lane);
  jump(fiber.context, host, host);
  current = &fiber;
}

// From a fiber: leaves the error for run_kernel() and never comes back.
[[noreturn]] HARNESS_RAW void fail(const std::string& message) {
  Fiber& fiber = me();
  char place[256];
  std::snprintf(place, sizeof(place), " [block %u thread %u, %s:%d]", block_index.x, fiber.index.x, fiber.file,
                fiber.line);
  if (running.error.empty()) running.error = message + place;
  HARNESS_TSAN(__tsan_release(&running.end);)
  for (;;) {
    warps[fiber.warp].ready = 0;
    jump(fiber.context, host, host);
  }
}

// Whether all live lanes of the mask have posted; then each has its result.
HARNESS_RAW bool complete(unsigned warp, uint32_t mask) {
  Fiber* lanes = &fibers[warp * kWarp];
  const uint32_t live = mask & warps[warp].exists & ~warps[warp].done;
  for (uint32_t left = live; left; left &= left - 1) {
    const Fiber& fiber = lanes[std::countr_zero(left)];
    if (!fiber.posted || fiber.mask != mask) return false;
  }
  for (uint32_t left = live; left; left &= left - 1) {
    Fiber& fiber = lanes[std::countr_zero(left)];
    if (!(live >> fiber.source & 1)) {
      current = &fiber;
      fail("shuffle reads lane " + std::to_string(fiber.source) +
           ", which has ended, does not exist or is not in the mask");
    }
    fiber.result = lanes[fiber.source].value;
  }
  for (uint32_t left = live; left; left &= left - 1) lanes[std::countr_zero(left)].posted = false;
  warps[warp].ready |= live;
  return true;
}

HARNESS_RAW void fiber_main() {
  entered(host);
  for (;;) {
    (*body)();
    Fiber& fiber = me();
    Warp& warp = warps[fiber.warp];
    fiber.done = true;
    warp.done |= 1u << fiber.lane;
    warp.ready &= ~(1u << fiber.lane);
    ++running.done;
    HARNESS_TSAN(__tsan_release(&running.end);)
    for (uint32_t left = warp.exists & ~warp.done; left; left &= left - 1) {
      Fiber& other = fibers[fiber.warp * kWarp + std::countr_zero(left)];
      if (other.posted && complete(fiber.warp, other.mask)) break;
    }
    current = &fiber;
    jump(fiber.context, host, host);
  }
}

// The module's thread-local block: __shared__ variables.
int find_storage(dl_phdr_info* info, size_t, void* out) {
  const auto anchor = reinterpret_cast<uintptr_t>(&module_anchor);
  bool mine = false;
  size_t bytes = 0;
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const auto& header = info->dlpi_phdr[k];
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && anchor >= begin && anchor < begin + header.p_memsz) mine = true;
    if (header.p_type == PT_TLS) bytes = header.p_memsz;
  }
  if (!mine) return 0;
  auto* found = static_cast<std::pair<void*, size_t>*>(out);
  *found = {info->dlpi_tls_data, info->dlpi_tls_data ? bytes : 0};
  return 1;
}

HARNESS_RAW void new_shared_memory() {
  *static_cast<volatile char*>(&storage_anchor) = 0;  // the block comes into being at the first touch
  std::pair<void*, size_t> storage{};
  dl_iterate_phdr(find_storage, &storage);
  forget(storage.first, storage.second);
  volatile char* memory = static_cast<char*>(storage.first);
  for (size_t i = 0; i < storage.second; ++i) memory[i] = static_cast<char>(0xFF);
}

HARNESS_RAW void new_threads() {
  for (unsigned t = 0; t < running.threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.index = {t, 0, 0};
    fiber.warp = t / kWarp;
    fiber.lane = t % kWarp;
    fiber.done = fiber.posted = false;
    fiber.file = "kernel entry";
    fiber.line = 0;
    if (!fiber.started) prepare(fiber.context, fiber_main);
    fiber.started = true;
    HARNESS_TSAN(forget(fiber.context.stack + kStackBytes - kForgotten, kForgotten);
                 fiber.context.tsan = __tsan_create_fiber(0);)
  }
  for (unsigned w = 0; w * kWarp < running.threads; ++w) {
    const unsigned lanes = std::min(running.threads - w * kWarp, kWarp);
    warps[w].exists = warps[w].ready = lanes == kWarp ? ~0u : (1u << lanes) - 1;
    warps[w].done = 0;
  }
}

std::string place_of(const Fiber& fiber) { return std::string(fiber.file) + ":" + std::to_string(fiber.line); }

// All threads that have not ended wait at a barrier: lets them go on.
HARNESS_RAW void release_barrier() {
  const Fiber* first = nullptr;
  for (unsigned t = 0; t < running.threads; ++t) {
    Fiber& fiber = fibers[t];
    if (fiber.done) continue;
    if (!first) first = &fiber;
    if (place_of(fiber) != place_of(*first)) {
      running.error = "divergent __syncthreads: some threads at " + place_of(*first) + ", others at " + place_of(fiber);
    }
    acquire_for(fiber, barrier_place());
  }
  running.arrived = 0;
  running.result = running.predicate;
  running.predicate = 0;
  for (unsigned w = 0; w * kWarp < running.threads; ++w) warps[w].ready = warps[w].exists & ~warps[w].done;
}

HARNESS_RAW void report_deadlock() {
  running.error = "deadlock: " + std::to_string(running.arrived) + " thread(s) wait in __syncthreads, " +
                  std::to_string(running.done) + " ended, the others wait for lanes that never come;";
  for (unsigned t = 0, told = 0; t < running.threads && told < 3; ++t) {
    if (fibers[t].done) continue;
    running.error += " thread " + std::to_string(t) + " at " + place_of(fibers[t]);
    ++told;
  }
}

std::vector<void*> ended_tsan_threads;

void bury_tsan_threads() {
  HARNESS_TSAN(for (void* thread : ended_tsan_threads) __tsan_destroy_fiber(thread);)
  ended_tsan_threads.clear();
}

HARNESS_RAW void run_block(unsigned index, Order& order, std::vector<unsigned>& warp_order) {
  running.done = running.arrived = 0;
  running.predicate = 0;
  ++running.number;
  block_index = {index, 0, 0};
  new_shared_memory();
  new_threads();
  const unsigned warp_count = (running.threads + kWarp - 1) / kWarp;
  while (running.done < running.threads && running.error.empty()) {
    bool progress = false;
    order.fill(warp_order, warp_count);
    for (unsigned w : warp_order) {
      while (warps[w].ready && running.error.empty()) {
        Fiber& fiber = fibers[w * kWarp + order.pick(warps[w].ready)];
        current = &fiber;
        jump(host, fiber.context, host);
        progress = true;
      }
    }
    if (!running.error.empty() || running.done == running.threads) break;
    if (running.arrived > 0 && running.arrived + running.done == running.threads) {
      release_barrier();
    } else if (!progress) {
      report_deadlock();
    }
  }
  HARNESS_TSAN(for (unsigned t = 0; t < running.threads; ++t) ended_tsan_threads.push_back(fibers[t].context.tsan);
               if (ended_tsan_threads.size() > kTsanThreads) bury_tsan_threads();)
  if (running.error.empty()) return;
  HARNESS_TSAN(__tsan_acquire(&running.end);)
  for (Fiber& fiber : fibers) fiber.started = false;  // their stacks are in the middle of something
}

}  // namespace

HARNESS_RAW int barrier(int predicate, const char* file, int line) {
  Fiber& fiber = me();
  fiber.file = file;
  fiber.line = line;
  ++running.arrived;
  running.predicate |= predicate != 0;
  HARNESS_TSAN(__tsan_release(barrier_place());)
  wait();
  return running.result;
}

HARNESS_RAW uint64_t shuffle(uint32_t mask, uint64_t value, int lane_xor, const char* file, int line) {
  Fiber& fiber = me();
  fiber.file = file;
  fiber.line = line;
  if (!(mask >> fiber.lane & 1)) fail("the calling lane is not in its own mask");
  fiber.posted = true;
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = static_cast<int>(fiber.lane) ^ lane_xor;
  if (complete(fiber.warp, mask)) {
    current = &fiber;
  } else {
    wait();
  }
  return fiber.result;
}

#if defined(__SANITIZE_THREAD__)  // it knows no fences: one is the release and acquire of a place shared by all of them
void fence() {
  __tsan_release(&running.fence);
  __tsan_acquire(&running.fence);
}
#else
void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

void run_kernel(const std::function<void()>& kernel, dim3 grid, dim3 block) {
  if (fibers.empty()) fibers.resize(kMostThreads), warps.resize(kMostThreads / kWarp);
  body = &kernel;
  grid_dim = grid;
  running.threads = block.x;
  running.error.clear();
  HARNESS_TSAN(host.tsan = __tsan_get_current_fiber();)
  Order order;
  std::vector<unsigned> blocks, warp_order;
  order.fill(blocks, grid.x);
  for (unsigned index : blocks) {
    run_block(index, order, warp_order);
    if (!running.error.empty()) throw std::runtime_error("CUDA harness: " + running.error);
  }
  HARNESS_TSAN(__tsan_acquire(&running.end);)
  bury_tsan_threads();
}

}  // namespace harness
