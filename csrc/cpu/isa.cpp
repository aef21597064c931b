#include "isa.h"

#if defined(__linux__)
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace gradacc {

namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avx512"};

bool supported(Isa isa) {
#if GRADACC_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return isa == Isa::kPlain || (isa == Isa::kAvx2 && avx2) || (isa == Isa::kAvx512 && avx512);
#else
  return isa == Isa::kPlain;
#endif
}

Isa parse(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name != kNames[i]) continue;
    if (supported(static_cast<Isa>(i))) return static_cast<Isa>(i);
    throw std::invalid_argument("GRADACC_FUSED_ISA: this machine cannot run '" + name +
                                "'. Unset it to let the package choose.");
  }
  throw std::invalid_argument("GRADACC_FUSED_ISA must be plain, avx2 or avx512, got '" + name + "'.");
}

Isa choose() {
  if (const char* forced = std::getenv("GRADACC_FUSED_ISA")) return parse(forced);
  if (supported(Isa::kAvx512)) return Isa::kAvx512;
  return supported(Isa::kAvx2) ? Isa::kAvx2 : Isa::kPlain;
}

std::atomic<int>& chosen() {
  static std::atomic<int> isa{static_cast<int>(choose())};
  return isa;
}

// At most 32 MiB: what a machine reports is the cache of all its cores together.
int64_t last_level_cache() {
  constexpr int64_t kMost = int64_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const int64_t bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (bytes > 0) return std::min(bytes, kMost);
#endif
  return kMost;
}

std::atomic<int64_t>& threshold() {
  static std::atomic<int64_t> bytes{last_level_cache()};
  return bytes;
}

}  // namespace

Isa current_isa() { return static_cast<Isa>(chosen().load(std::memory_order_relaxed)); }
std::string isa_name() { return kNames[static_cast<int>(current_isa())]; }
void use_isa(const std::string& name) { chosen().store(static_cast<int>(parse(name))); }

int64_t streaming_threshold() { return threshold().load(std::memory_order_relaxed); }
void set_streaming_threshold(int64_t bytes) { threshold().store(bytes); }

}  // namespace gradacc
