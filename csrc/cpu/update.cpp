// update_: the accumulated gradient times the multiplier, clipped by value, into parameters and state, in one pass.
// Bytes per element (AdamW, bf16 parameter): reads the gradient, 12 of main param and moments; writes 12 + 2.
#include <type_traits>

#include "passes.h"
#include "simd.h"
#include "tile.h"

namespace gradacc {
namespace {

struct UpdateArgs {
  const UpdateRow& row;
  const Chunk& chunk;
  const StepScalars& scalars;
  Isa isa;
  bool stream;  // whole tiles of low-precision parameters are written past the cache
  double multiplier;
  double max_grad_value;
};

template <typename Math>
struct Tile {
  const Math* grad;
  Math* param;       // read and written: main param, parameter, or a copy of it
  Math* exp_avg;     // sgd: momentum buffer
  Math* exp_avg_sq;  // nullptr: sgd
  Math multiplier;
  Math bound;
};

struct NoCopy {};

template <typename Math>
GRADACC_INLINE Math scaled_and_clamped(const Tile<Math>& tile, int64_t i) {
  Math value = tile.grad[i] * tile.multiplier;
  value = value > tile.bound ? tile.bound : value;
  return value < -tile.bound ? -tile.bound : value;
}

// copies: the low-precision parameter, written from the updated value; NoCopy: there is none.
template <typename Math, typename Copy>
GRADACC_INLINE void update_tile(const Tile<Math>& in, Copy* copies, int64_t n, Rule rule, const RuleScalars<Math>& s) {
  const Tile<Math> tile = in;
  const auto copy = [&](int64_t i, Math value) __attribute__((always_inline)) {
    if constexpr (!std::is_same_v<Copy, NoCopy>) narrow(value, copies[i]);
  };
  if (rule != Rule::kSgd) {
    GRADACC_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      Math param = tile.param[i];
      adam(param, scaled_and_clamped(tile, i), tile.exp_avg[i], tile.exp_avg_sq[i], s);
      tile.param[i] = param;
      copy(i, param);
    }
  } else if (tile.exp_avg && s.momentum != Math(0)) {
    GRADACC_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      Math param = tile.param[i];
      sgd_momentum(param, scaled_and_clamped(tile, i), tile.exp_avg[i], s);
      tile.param[i] = param;
      copy(i, param);
    }
  } else {
    GRADACC_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      Math param = tile.param[i];
      sgd(param, scaled_and_clamped(tile, i), s);
      tile.param[i] = param;
      copy(i, param);
    }
  }
}

// Copy: the parameter's type where the value that is updated lies elsewhere, else NoCopy.
template <typename Simd, typename Math, typename Copy>
GRADACC_INLINE void update_chunk(const UpdateArgs& args) {
  const UpdateRow& row = args.row;
  const RuleScalars<Math> scalars = args.scalars.of<Math>(row.scalars);
  const Rule rule = args.scalars.rule();
  const GatherTile<Math>* gather = gather_tile<Math>(args.isa);
  alignas(64) Math grad[kTile];
  alignas(64) Math widened[kTile];
  alignas(64) Copy streamed[kTile];
  constexpr bool kCopies = !std::is_same_v<Copy, NoCopy>;
  const bool stream = kCopies && args.stream && reinterpret_cast<uintptr_t>(row.param) % 64 == 0;
  Math* values = static_cast<Math*>(kCopies ? row.main_param : row.param);
  Math* exp_avg = static_cast<Math*>(row.exp_avg);
  Math* exp_avg_sq = static_cast<Math*>(row.exp_avg_sq);
  for_tiles(args.chunk.start, args.chunk.numel, [&](int64_t start, int64_t n) __attribute__((always_inline)) {
    gather(grad, row.gradient, start, n);
    const bool past_cache = stream && n == kTile;
    Copy* copies = nullptr;
    if constexpr (kCopies) {
      copies = past_cache ? streamed : static_cast<Copy*>(row.param) + start;
      if (!values) load_elements(widened, static_cast<const Copy*>(row.param) + start, n);
    }
    const Tile<Math> tile{grad,
                          values ? values + start : widened,
                          exp_avg ? exp_avg + start : nullptr,
                          exp_avg_sq ? exp_avg_sq + start : nullptr,
                          static_cast<Math>(args.multiplier),
                          static_cast<Math>(args.max_grad_value)};
    update_tile(tile, copies, n, rule, scalars);
    if constexpr (kCopies) {
      if (past_cache) Simd::stream(static_cast<Copy*>(row.param) + start, streamed, kTile * sizeof(Copy));
    }
  });
  if (stream) Simd::fence();
}

template <typename Simd>
GRADACC_INLINE void update_any(const UpdateArgs& args) {
  const bool separate = args.row.main_param != nullptr;
  if (args.row.is_double) {
    separate ? update_chunk<Simd, double, double>(args) : update_chunk<Simd, double, NoCopy>(args);
    return;
  }
  switch (args.row.param_dtype) {
    case Dtype::kBFloat16:
      return update_chunk<Simd, float, BFloat16>(args);
    case Dtype::kFloat16:
      return update_chunk<Simd, float, Float16>(args);
    default:
      return separate ? update_chunk<Simd, float, float>(args) : update_chunk<Simd, float, NoCopy>(args);
  }
}

void update_plain(const UpdateArgs& args) { update_any<Plain>(args); }
GRADACC_TARGET_AVX2 void update_avx2(const UpdateArgs& args) { update_any<Avx2>(args); }
GRADACC_TARGET_AVX512 void update_avx512(const UpdateArgs& args) { update_any<Avx512>(args); }
constexpr IsaLoops<void(const UpdateArgs&)> kUpdate{update_plain, update_avx2, update_avx512};

}  // namespace

void update_pass(const Chunks& chunks, const std::vector<UpdateRow>& rows, const StepScalars& scalars,
                 double multiplier, double max_grad_value) {
  const Isa isa = current_isa();
  const auto loop = kUpdate.of(isa);
  const bool stream = chunks.elements() * int64_t{sizeof(BFloat16)} > streaming_threshold();
  chunks.for_each([&](int64_t k) {
    const UpdateRow& row = rows[chunks[k].tensor];
    prefetch_ahead(chunks, k, rows);
    if (row.param) loop({row, chunks[k], scalars, isa, stream, multiplier, max_grad_value});
  });
}

}  // namespace gradacc
