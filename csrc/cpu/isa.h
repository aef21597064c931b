// Which instruction set the CPU loops run on: chosen at run time, the same bits on each.
//
// A stage's loop is an always-inline function; isa.h's callers wrap it once per instruction set with GRADACC_TARGET_*
// and pick by current_isa(). GRADACC_FUSED_ISA=plain|avx2|avx512 forces one.
#pragma once

#include <string>

namespace gradacc {

enum class Isa : int { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GRADACC_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define GRADACC_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#else
#define GRADACC_TARGET_AVX2
#define GRADACC_TARGET_AVX512
#endif

// The best one this machine runs, or the one that was forced.
Isa current_isa();
std::string isa_name();
// Forces one by name; throws std::invalid_argument for an unknown name or one this machine cannot run.
void use_isa(const std::string& name);

template <typename Args>
struct IsaLoops {
  void (*plain)(const Args&);
  void (*avx2)(const Args&);
  void (*avx512)(const Args&);

  void operator()(const Args& args) const {
    switch (current_isa()) {
      case Isa::kAvx512:
        return avx512(args);
      case Isa::kAvx2:
        return avx2(args);
      default:
        return plain(args);
    }
  }
};

}  // namespace gradacc
