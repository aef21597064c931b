// Fibers: CUDA threads as stacks that one host thread switches between, known to the sanitizers.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void __tsan_java_init(unsigned long, unsigned long);
void __tsan_java_alloc(unsigned long, unsigned long);
void __tsan_java_free(unsigned long, unsigned long);
}
#define HARNESS_TSAN(...) __VA_ARGS__
#else
#define HARNESS_TSAN(...)
#endif

// The harness's own code is invisible to the sanitizers: what it does stands for hardware.
#define HARNESS_RAW __attribute__((noinline, no_sanitize("thread", "address", "undefined")))

namespace harness {

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kPage = 4096;

struct Context {
  char* stack = nullptr;
  void* top = nullptr;         // saved stack pointer
  void* fake_stack = nullptr;  // address sanitizer's
  void* tsan = nullptr;        // thread sanitizer's
  size_t stack_bytes = kStackBytes;
#if !defined(__x86_64__)
  ucontext_t machine;
#endif
};

#if defined(__x86_64__)
__attribute__((naked, noinline, no_sanitize("thread", "address", "undefined"))) inline void switch_stack(void** from,
                                                                                                         void* to) {
  (void)from, (void)to;
  __asm__ volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}
#endif

// Leaves one context for another; returns when somebody comes back. `host`: the context that is no fiber.
HARNESS_RAW inline void jump(Context& from, Context& to, Context& host) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
  HARNESS_TSAN(__tsan_switch_to_fiber(to.tsan, 1);)  // 1: switching orders nothing
#if defined(__x86_64__)
  __asm__ volatile("" ::: "memory");
  switch_stack(&from.top, to.top);
  __asm__ volatile("" ::: "memory");
#else
  swapcontext(&from.machine, &to.machine);
#endif
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(from.fake_stack, &bottom, &bytes);
  if (&from != &host) host.stack = static_cast<char*>(const_cast<void*>(bottom)), host.stack_bytes = bytes;
#endif
  (void)host;
}

// Makes the context enter main() when it is next jumped to. Its stack is mapped once; below it lies a page that faults.
HARNESS_RAW inline void prepare(Context& context, void (*main)()) {
  if (!context.stack) {
    void* memory =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, kPage, PROT_NONE);
    context.stack = static_cast<char*>(memory);
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(context.stack, kStackBytes);
#endif
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(context.stack + kStackBytes - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(main);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.top = top;
#else
  getcontext(&context.machine);
  context.machine.uc_stack.ss_sp = context.stack;
  context.machine.uc_stack.ss_size = kStackBytes;
  context.machine.uc_link = nullptr;
  makecontext(&context.machine, main, 0);
#endif
}

// To be called first by main().
HARNESS_RAW inline void entered(Context& host) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &host.stack_bytes);
  host.stack = static_cast<char*>(const_cast<void*>(bottom));
#endif
  (void)host;
}

// Thread sanitizer: accesses to this memory so far never happened. (Between blocks: shared memory and stacks are new.)
HARNESS_RAW inline void forget(void* memory, size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  static bool ready = (__tsan_java_init(8, 8), true);
  (void)ready;
  const unsigned long begin = (reinterpret_cast<unsigned long>(memory) + 7) & ~7ul;
  const unsigned long end = (reinterpret_cast<unsigned long>(memory) + bytes) & ~7ul;
  if (end > begin) __tsan_java_free(begin, end - begin), __tsan_java_alloc(begin, end - begin);
#endif
  (void)memory, (void)bytes;
}

}  // namespace harness
