// Which instruction set the CPU loops run on: chosen at run time, the same bits on each.
//
// A stage's loop is an always-inline function; isa.h's callers wrap it once per instruction set with GRADACC_TARGET_*
// and pick by current_isa(). GRADACC_FUSED_ISA=plain|avx2|avx512 forces one.
#pragma once

#include <cstdint>
#include <string>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define GRADACC_X86 1
#define GRADACC_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define GRADACC_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#else
#define GRADACC_X86 0
#define GRADACC_TARGET_AVX2
#define GRADACC_TARGET_AVX512
#endif

// Before a loop whose iterations do not depend on each other, though its pointers may be equal.
#if defined(__clang__)
#define GRADACC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define GRADACC_INDEPENDENT _Pragma("GCC ivdep")
#else
#define GRADACC_INDEPENDENT
#endif

namespace gradacc {

enum class Isa : int { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

// The best one this machine runs, or the one that was forced.
Isa current_isa();
std::string isa_name();
// Forces one by name; throws std::invalid_argument for an unknown name or one this machine cannot run.
void use_isa(const std::string& name);

// Buffers of more bytes than this are written past the cache: they would not stay in it. By default the size of the
// last-level cache, 32 MiB at most.
int64_t streaming_threshold();
void set_streaming_threshold(int64_t bytes);

// One loop, compiled for each instruction set.
template <typename Function>
struct IsaLoops {
  Function* plain;
  Function* avx2;
  Function* avx512;

  constexpr Function* of(Isa isa) const { return isa == Isa::kAvx512 ? avx512 : (isa == Isa::kAvx2 ? avx2 : plain); }
};

}  // namespace gradacc
