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

// Elements first to first + count. copies: the low-precision parameter, written from the updated value; NoCopy: there
// is none.
template <bool kL2, typename Math, typename Copy>
GRADACC_INLINE void update_elements(const Tile<Math>& in, Copy* copies, int64_t first, int64_t count, Rule rule,
                                    const RuleScalars<Math>& scalars) {
  const Tile<Math> tile = in;  // of its own: no store in the loop can change it
  const RuleScalars<Math> s = scalars;
  const auto each = [&](auto&& rule_of_one) __attribute__((always_inline)) {
    GRADACC_INDEPENDENT
    for (int64_t i = first; i < first + count; ++i) {
      Math param = tile.param[i];
      rule_of_one(param, scaled_and_clamped(tile, i), i);
      tile.param[i] = param;
      if constexpr (!std::is_same_v<Copy, NoCopy>) narrow(param, copies[i]);
    }
  };
  if (rule != Rule::kSgd) {
    each([&](Math& param, Math grad, int64_t i)
             __attribute__((always_inline)) { adam<kL2>(param, grad, tile.exp_avg[i], tile.exp_avg_sq[i], s); });
  } else if (tile.exp_avg && s.momentum != Math(0)) {
    each([&](Math& param, Math grad, int64_t i)
             __attribute__((always_inline)) { sgd_momentum<kL2>(param, grad, tile.exp_avg[i], s); });
  } else {
    each([&](Math& param, Math grad, int64_t) __attribute__((always_inline)) { sgd<kL2>(param, grad, s); });
  }
}

// Elements 0 to n of a tile. A whole one goes block by block, and each asks for what the next tile will read.
template <bool kL2, typename Math, typename Copy>
GRADACC_INLINE void update_tile(const Tile<Math>& tile, const Gradient& gradient, int64_t start, int64_t n,
                                Copy* copies, Rule rule, const RuleScalars<Math>& s) {
  if (n != kTile) return update_elements<kL2>(tile, copies, 0, n, rule, s);
  for (int64_t block = 0; block < kTile; block += kBlock) {
    prefetch(gradient, start + block + kAhead, kBlock, sizeof(Math));
    read_ahead(tile.param + block);
    if (tile.exp_avg) read_ahead(tile.exp_avg + block);
    if (tile.exp_avg_sq) read_ahead(tile.exp_avg_sq + block);
    update_elements<kL2>(tile, copies, block, kBlock, rule, s);
  }
}

// Copy: the parameter's type where the value that is updated lies elsewhere, else NoCopy.
template <typename Math, typename Copy>
GRADACC_INLINE void update_chunk(const UpdateArgs& args) {
  const UpdateRow& row = args.row;
  const RuleScalars<Math> scalars = args.scalars.of<Math>(row.scalars);
  const Rule rule = args.scalars.rule();
  const GatherTile<Math>* gather = gather_tile<Math>(args.isa);
  alignas(64) Math grad[kTile];
  alignas(64) Math widened[kTile];
  constexpr bool kCopies = !std::is_same_v<Copy, NoCopy>;
  Math* values = static_cast<Math*>(kCopies ? row.main_param : row.param);
  Math* exp_avg = static_cast<Math*>(row.exp_avg);
  Math* exp_avg_sq = static_cast<Math*>(row.exp_avg_sq);
  for_tiles(args.chunk.start, args.chunk.numel, [&](int64_t start, int64_t n) __attribute__((always_inline)) {
    gather(grad, row.gradient, start, n, /*ahead=*/false);
    Copy* copies = nullptr;
    if constexpr (kCopies) {
      copies = static_cast<Copy*>(row.param) + start;
      if (!values) load_elements(widened, static_cast<const Copy*>(row.param) + start, n);
    }
    const Tile<Math> tile{grad,
                          values ? values + start : widened,
                          exp_avg ? exp_avg + start : nullptr,
                          exp_avg_sq ? exp_avg_sq + start : nullptr,
                          static_cast<Math>(args.multiplier) * scalars.sign,
                          static_cast<Math>(args.max_grad_value)};
    if (scalars.weight_decay != Math(0)) {
      update_tile<true>(tile, row.gradient, start, n, copies, rule, scalars);
    } else {
      update_tile<false>(tile, row.gradient, start, n, copies, rule, scalars);
    }
  });
}

GRADACC_INLINE void update_any(const UpdateArgs& args) {
  const bool separate = args.row.main_param != nullptr;
  if (args.row.is_double) {
    separate ? update_chunk<double, double>(args) : update_chunk<double, NoCopy>(args);
    return;
  }
  switch (args.row.param_dtype) {
    case Dtype::kBFloat16:
      return update_chunk<float, BFloat16>(args);
    case Dtype::kFloat16:
      return update_chunk<float, Float16>(args);
    default:
      return separate ? update_chunk<float, float>(args) : update_chunk<float, NoCopy>(args);
  }
}

void update_plain(const UpdateArgs& args) { update_any(args); }
GRADACC_TARGET_AVX2 void update_avx2(const UpdateArgs& args) { update_any(args); }
GRADACC_TARGET_AVX512 void update_avx512(const UpdateArgs& args) { update_any(args); }
constexpr IsaLoops<void(const UpdateArgs&)> kUpdate{update_plain, update_avx2, update_avx512};

}  // namespace

void update_pass(const Chunks& chunks, const std::vector<UpdateRow>& rows, const StepScalars& scalars,
                 double multiplier, double max_grad_value) {
  const Isa isa = current_isa();
  const auto loop = kUpdate.of(isa);
  chunks.for_each([&](int64_t k) {
    const UpdateRow& row = rows[chunks[k].tensor];
    prefetch_ahead(chunks, k, rows);
    if (row.param) loop({row, chunks[k], scalars, isa, multiplier, max_grad_value});
  });
}

}  // namespace gradacc
