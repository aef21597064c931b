// STREAM triad, a = b + s * c, as plain and as streaming stores: the memory bandwidth that other rows are a share of.
// Plain C++ threads, so that no second OpenMP runtime spins beside torch's.

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define TRIAD_STREAMS 1
#endif

namespace {

constexpr int64_t kLine = 16;  // floats in a cache line: parts start on one

using Loop = void (*)(float* a, const float* b, const float* c, float s, int64_t begin, int64_t end);

void plain(float* a, const float* b, const float* c, float s, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) a[i] = b[i] + s * c[i];
}

#ifdef TRIAD_STREAMS
__attribute__((target("avx"))) void stream_avx(float* a, const float* b, const float* c, float s, int64_t begin,
                                               int64_t end) {
  const __m256 factor = _mm256_set1_ps(s);
  for (int64_t i = begin; i < end; i += 8) {
    _mm256_stream_ps(a + i, _mm256_add_ps(_mm256_load_ps(b + i), _mm256_mul_ps(factor, _mm256_load_ps(c + i))));
  }
  _mm_sfence();
}

void stream_sse(float* a, const float* b, const float* c, float s, int64_t begin, int64_t end) {
  const __m128 factor = _mm_set1_ps(s);
  for (int64_t i = begin; i < end; i += 4) {
    _mm_stream_ps(a + i, _mm_add_ps(_mm_load_ps(b + i), _mm_mul_ps(factor, _mm_load_ps(c + i))));
  }
  _mm_sfence();
}
#endif

Loop streaming() {
#ifdef TRIAD_STREAMS
  return __builtin_cpu_supports("avx") ? stream_avx : stream_sse;
#else
  return nullptr;
#endif
}

}  // namespace

extern "C" {

// Whether there are streaming stores here.
int triad_streams() { return streaming() != nullptr; }

// Seconds of one triad over n floats (a multiple of 16; 32-byte aligned arrays) by so many threads; negative: refused.
double triad(float* a, const float* b, const float* c, float s, int64_t n, int threads, int stream) {
  const Loop loop = stream ? streaming() : plain;
  const auto misaligned = [](const float* p) { return reinterpret_cast<uintptr_t>(p) % 32 != 0; };
  if (!loop || threads < 1 || n % kLine != 0 || misaligned(a) || misaligned(b) || misaligned(c)) return -1.0;
  const int64_t part = (n / kLine + threads - 1) / threads * kLine;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) {
    const int64_t begin = t * part < n ? t * part : n, end = begin + part < n ? begin + part : n;
    others.emplace_back(loop, a, b, c, s, begin, end);
  }
  loop(a, b, c, s, 0, part < n ? part : n);
  for (auto& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}
