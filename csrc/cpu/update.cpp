// update_: the accumulated gradient times the multiplier, clipped by value, into parameters and state, in one pass.
// Bytes per element (AdamW, bf16 parameter): reads the gradient, 12 of main param and moments; writes 12 + 2.
#include <cstring>
#include <type_traits>

#include "passes.h"
#include "simd.h"
#include "tile.h"

namespace gradacc {
namespace {

struct UpdateArgs {
  const StepRow& row;
  const Gradients& added;
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
  Math* exp_avg_sq;  // nullptr: sgd, lion
  Math multiplier;
  Math bound;
};

struct NoCopy {};

// Elements 0 to n. copies: the low-precision parameter, written from the updated value; NoCopy: there is none.
template <bool kL2, typename Math, typename Copy>
GRADACC_INLINE void update_elements(const Tile<Math>& in, Copy* copies, int64_t n, Rule rule,
                                    const RuleScalars<Math>& scalars) {
  const Tile<Math> tile = in;  // of its own: no store in the loop can change it
  const RuleScalars<Math> s = scalars;
  const auto each = [&](auto&& rule_of_one) __attribute__((always_inline)) {
    GRADACC_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      Math param = tile.param[i];
      rule_of_one(param, scaled_and_clamped(tile.grad[i], tile.multiplier, tile.bound), i);
      tile.param[i] = param;
      if constexpr (!std::is_same_v<Copy, NoCopy>) narrow(param, copies[i]);
    }
  };
  const Formula formula = formula_of(rule);
  if (formula == Formula::kAdam) {
    each([&](Math& param, Math grad, int64_t i)
             __attribute__((always_inline)) { adam<kL2>(param, grad, tile.exp_avg[i], tile.exp_avg_sq[i], s); });
  } else if (formula == Formula::kLion) {
    if constexpr (!kL2) {  // its decay is decoupled
      each([&](Math& param, Math grad, int64_t i)
               __attribute__((always_inline)) { lion(param, grad, tile.exp_avg[i], s); });
    }
  } else if (tile.exp_avg && s.momentum != Math(0)) {
    each([&](Math& param, Math grad, int64_t i)
             __attribute__((always_inline)) { sgd_momentum<kL2>(param, grad, tile.exp_avg[i], s); });
  } else {
    each([&](Math& param, Math grad, int64_t) __attribute__((always_inline)) { sgd<kL2>(param, grad, s); });
  }
}

// What is left of a chunk behind its last whole block. Functions of their own: inlined behind every kind of run they
// would be half of what is compiled.
template <typename Math, typename Copy>
using Rest = void(const Tile<Math>& tile, Copy* copies, int64_t n, Rule rule, const RuleScalars<Math>& scalars);
template <bool kL2, typename Math, typename Copy>
void rest_plain(const Tile<Math>& tile, Copy* copies, int64_t n, Rule rule, const RuleScalars<Math>& scalars) {
  update_elements<kL2>(tile, copies, n, rule, scalars);
}
template <bool kL2, typename Math, typename Copy>
GRADACC_TARGET_AVX2 void rest_avx2(const Tile<Math>& tile, Copy* copies, int64_t n, Rule rule,
                                   const RuleScalars<Math>& scalars) {
  update_elements<kL2>(tile, copies, n, rule, scalars);
}
template <bool kL2, typename Math, typename Copy>
GRADACC_TARGET_AVX512 void rest_avx512(const Tile<Math>& tile, Copy* copies, int64_t n, Rule rule,
                                       const RuleScalars<Math>& scalars) {
  update_elements<kL2>(tile, copies, n, rule, scalars);
}
template <bool kL2, typename Math, typename Copy>
constexpr IsaLoops<Rest<Math, Copy>> kRest{rest_plain<kL2, Math, Copy>, rest_avx2<kL2, Math, Copy>,
                                           rest_avx512<kL2, Math, Copy>};

// Elements 0 to n of what `whole` points at, their gradients those of the run. Whole blocks also ask for what the block
// kAhead elements behind them needs.
template <typename Simd, bool kL2, typename OneRun, typename Math, typename Copy>
GRADACC_INLINE void update_run(const OneRun& from, const Tile<Math>& whole, Copy* copies, int64_t n, Rule rule,
                               const RuleScalars<Math>& scalars, Isa isa) {
  const OneRun run = from;
  alignas(64) Math grad[kBlock];
  const auto tile_from = [&](int64_t first) __attribute__((always_inline)) {
    return Tile<Math>{grad,
                      whole.param + first,
                      whole.exp_avg ? whole.exp_avg + first : nullptr,
                      whole.exp_avg_sq ? whole.exp_avg_sq + first : nullptr,
                      whole.multiplier,
                      whole.bound};
  };
  const auto copies_from = [&](int64_t first)
                               __attribute__((always_inline)) { return copies ? copies + first : nullptr; };
  int64_t i = 0;
  for (; n - i >= kBlock; i += kBlock) {
    run.ask_ahead(i);
    read_ahead(whole.param + i);
    if (whole.exp_avg) read_ahead(whole.exp_avg + i);
    if (whole.exp_avg_sq) read_ahead(whole.exp_avg_sq + i);
    if constexpr (!std::is_same_v<Copy, NoCopy>) read_ahead(copies + i);
    Simd::sum_block(grad, run, i);
    update_elements<kL2>(tile_from(i), copies_from(i), kBlock, rule, scalars);
  }
  if (i == n) return;
  for (int64_t k = 0; k < n - i; ++k) grad[k] = run.sum(i + k);
  kRest<kL2, Math, Copy>.of(isa)(tile_from(i), copies_from(i), n - i, rule, scalars);
}

// Copy: the parameter's type where it is of low precision, else NoCopy.
template <typename Simd, typename Math, typename Copy>
GRADACC_INLINE void update_chunk(const UpdateArgs& args) {
  constexpr bool kCopies = !std::is_same_v<Copy, NoCopy>;
  using Element = std::conditional_t<kCopies, Copy, Math>;  // what gradients usually are
  const StepRow& row = args.row;
  const RuleScalars<Math> scalars = args.scalars.of<Math>(row.scalars);
  const Gradient gradient{row.main_grad, args.added, args.chunk.tensor};
  const auto at = [&](void* array, int64_t start)
                      __attribute__((always_inline)) { return array ? static_cast<Math*>(array) + start : nullptr; };
  Math* values = static_cast<Math*>(kCopies || row.main_param ? row.main_param : row.param);
  const auto update = [&](const auto& run, Math* param, int64_t start, int64_t n) __attribute__((always_inline)) {
    const Tile<Math> tile{nullptr,
                          param,
                          at(row.exp_avg, start),
                          at(row.exp_avg_sq, start),
                          static_cast<Math>(args.multiplier) * scalars.sign,
                          static_cast<Math>(args.max_grad_value)};
    Copy* copies = kCopies ? static_cast<Copy*>(row.param) + start : nullptr;
    if (scalars.weight_decay != Math(0)) {
      update_run<Simd, true>(run, tile, copies, n, args.scalars.rule(), scalars, args.isa);
    } else {
      update_run<Simd, false>(run, tile, copies, n, args.scalars.rule(), scalars, args.isa);
    }
  };

  // A single run of the usual type: its sums need not be put down.
  const int64_t start = args.chunk.start, numel = args.chunk.numel;
  if constexpr (sizeof(Math) == sizeof(float)) {
    int64_t j = 0;
    const Taken taken = gradient.take(j, kRun);
    const bool usual = taken.count == 0 || taken.dtype == dtype_of<Element>();
    if (values && usual && gradient.none_left(j)) {
      const auto body = [&](const auto& run)
                            __attribute__((always_inline)) { update(run, values + start, start, numel); };
      return with_run<kRun, Element>(taken, gradient.base<Math>(start), gradient, start, body);
    }
  }
  alignas(64) Math grad[kTile];
  alignas(64) Math widened[kTile];
  const GatherTile<Math>* gather = gather_tile<Math>(args.isa);
  for_tiles(start, numel, [&](int64_t from, int64_t n) __attribute__((always_inline)) {
    gather(grad, gradient, from, n);
    if constexpr (kCopies) {
      if (!values) load_elements(widened, static_cast<const Copy*>(row.param) + from, n);
    }
    update(Run<0, true, Math, Math>(grad, gradient, Taken(), 0), values ? values + from : widened, from, n);
  });
}

// A function for each: all in one takes longer to compile.
template <typename Math, typename Copy>
void update_plain(const UpdateArgs& args) {
  update_chunk<Plain, Math, Copy>(args);
}
template <typename Math, typename Copy>
GRADACC_TARGET_AVX2 void update_avx2(const UpdateArgs& args) {
  update_chunk<Avx2, Math, Copy>(args);
}
template <typename Math, typename Copy>
GRADACC_TARGET_AVX512 void update_avx512(const UpdateArgs& args) {
  update_chunk<Avx512, Math, Copy>(args);
}

using Loop = void(const UpdateArgs&);
template <typename Math, typename Copy>
constexpr IsaLoops<Loop> kUpdate{update_plain<Math, Copy>, update_avx2<Math, Copy>, update_avx512<Math, Copy>};

Loop* loop_of(const StepRow& row, Isa isa) {
  if (row.is_double) return kUpdate<double, NoCopy>.of(isa);
  switch (static_cast<Dtype>(row.param_dtype)) {
    case Dtype::kBFloat16:
      return kUpdate<float, BFloat16>.of(isa);
    case Dtype::kFloat16:
      return kUpdate<float, Float16>.of(isa);
    default:
      return kUpdate<float, NoCopy>.of(isa);
  }
}

// The parameter's part of a chunk, where it has a main param of its own dtype.
void copy_main_param(const StepRow& row, const Chunk& chunk) {
  const Dtype dtype = static_cast<Dtype>(row.param_dtype);
  if (!row.main_param || dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16) return;
  const int64_t bytes = row.is_double ? sizeof(double) : sizeof(float);
  std::memcpy(static_cast<char*>(row.param) + chunk.start * bytes,
              static_cast<const char*>(row.main_param) + chunk.start * bytes, chunk.numel * bytes);
}

}  // namespace

void update_pass(const Chunks& chunks, const std::vector<StepRow>& rows, const Gradients& added,
                 const StepScalars& scalars, double multiplier, double max_grad_value) {
  const Isa isa = current_isa();
  chunks.for_each([&](int64_t k) {
    const StepRow& row = rows[chunks[k].tensor];
    prefetch_ahead(chunks, k, rows, added);
    if (!row.param) return;
    loop_of(row, isa)({row, added, chunks[k], scalars, isa, multiplier, max_grad_value});
    copy_main_param(row, chunks[k]);
  });
}

}  // namespace gradacc
