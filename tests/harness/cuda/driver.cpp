// One window without torch: flush, closing pass, clip, update, against plain loops. For the sanitizers, the coverage
// and the planted faults; exits with 1 and a line that says what differs. Argument: elements by which gradients and
// parameters start after a 16-byte boundary.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "launch.h"

using namespace gradacc;
using namespace gradacc::cuda;

namespace {

constexpr int kMicroBatches = 3;
const std::vector<int64_t> kSizes = {1, 7, 0, kSlice + 37, 300, 4096};
const double kWeights[kMicroBatches] = {1.5, 0.0, 0.25};

// An allocation that ends with the last of n elements, `skip` elements after a 16-byte boundary.
template <typename Element>
class Array {
 public:
  Array(int64_t n, int64_t skip) : memory_(allocate((n + skip) * sizeof(Element)), &std::free), skip_(skip) {}
  Element* get() const { return static_cast<Element*>(memory_.get()) + skip_; }
  Element& operator[](int64_t i) const { return get()[i]; }

 private:
  static void* allocate(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 16, bytes) != 0) std::abort();
    return memory;
  }
  std::unique_ptr<void, decltype(&std::free)> memory_;
  int64_t skip_;
};

uint32_t state = 1;
float draw() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f;
}

int failures = 0;
void expect(bool right, const char* what, int64_t tensor, int64_t element) {
  if (right || ++failures > 5) return;
  std::printf("WRONG: %s of tensor %ld, element %ld\n", what, static_cast<long>(tensor), static_cast<long>(element));
}

struct Tensors {
  std::vector<Array<BFloat16>> grads;  // [micro-batch][tensor]
  std::vector<Array<BFloat16>> params;
  std::vector<Array<float>> main_grads, main_params, exp_avgs, exp_avg_sqs;
};

}  // namespace

int main(int count, char** arguments) {
  const int64_t skip = count > 1 ? std::atoll(arguments[1]) : 0;
  const int64_t tensors = static_cast<int64_t>(kSizes.size());
  Tensors all;
  for (int64_t k = 0; k < kMicroBatches * tensors; ++k) {
    all.grads.emplace_back(kSizes[k % tensors], skip);
    for (int64_t i = 0; i < kSizes[k % tensors]; ++i) narrow(draw(), all.grads.back()[i]);
  }
  std::vector<Slice> slices;
  std::vector<int64_t> first_of_chunk = {0};
  std::vector<AccumulateRow> sum_rows;
  std::vector<UpdateRow> rows;
  for (int64_t t = 0; t < tensors; ++t) {
    all.params.emplace_back(kSizes[t], skip);
    for (auto* list : {&all.main_grads, &all.main_params, &all.exp_avgs, &all.exp_avg_sqs}) {
      list->emplace_back(kSizes[t], 0);
      for (int64_t i = 0; i < kSizes[t]; ++i) list->back()[i] = list == &all.exp_avg_sqs ? std::fabs(draw()) : draw();
    }
    for (int64_t start = 0; start < kSizes[t]; start += kSlice) {
      const int64_t left = kSizes[t] - start;
      slices.push_back({start, static_cast<int32_t>(t), static_cast<int32_t>(left < kSlice ? left : kSlice)});
    }
    if (kSizes[t] > 0) first_of_chunk.push_back(static_cast<int64_t>(slices.size()));
    sum_rows.push_back({all.main_grads[t].get(), 0});
    rows.push_back({all.main_grads[t].get(), kSizes[t] > 0 ? all.params[t].get() : nullptr, all.main_params[t].get(),
                    all.exp_avgs[t].get(), all.exp_avg_sqs[t].get(), static_cast<int32_t>(Dtype::kBFloat16), 0});
  }
  const int64_t chunks = static_cast<int64_t>(first_of_chunk.size()) - 1;
  const SliceTable table{slices.data(), first_of_chunk.data(), static_cast<int64_t>(slices.size()), chunks};
  std::vector<Address> addresses;
  for (int64_t k = 0; k < kMicroBatches * tensors; ++k) {
    addresses.push_back(kSizes[k % tensors] > 0 ? tagged(all.grads[k].get(), Dtype::kBFloat16) : 0);
  }
  const SourceArgs sources{addresses.data(), kWeights, kMicroBatches, static_cast<int32_t>(tensors), false, false};

  // The sums as they should be: what was there, then one fused multiply-add per micro-batch that weighs something.
  std::vector<std::vector<float>> sums(tensors);
  double squares = 0.0;
  for (int64_t t = 0; t < tensors; ++t) {
    for (int64_t i = 0; i < kSizes[t]; ++i) {
      float sum = all.main_grads[t][i];
      for (int j = 0; j < kMicroBatches; ++j) {
        if (kWeights[j] == 0.0) continue;
        sum = std::fmaf(static_cast<float>(kWeights[j]), widen(all.grads[j * tensors + t][i]), sum);
      }
      sums[t].push_back(sum);
      squares += static_cast<double>(sum) * sum;
    }
  }

  std::vector<double> of_slices(slices.size()), partials(chunks);
  unsigned counters[3] = {};
  float found_inf = -1.0f;
  AccumulateArgs accumulate{table, sum_rows.data(), {}, /*read=*/true, /*store=*/true};
  accumulate.norm = {of_slices.data(), partials.data(), chunks,        {&found_inf, false},
                     &counters[0],     &counters[1],    NormKind::kTwo};
  if (launch_accumulate(accumulate, sources, nullptr) != cudaSuccess) return 1;
  for (int64_t t = 0; t < tensors; ++t) {
    for (int64_t i = 0; i < kSizes[t]; ++i) expect(all.main_grads[t][i] == sums[t][i], "sum", t, i);
  }
  expect(found_inf == 0.0f && counters[0] == 0 && counters[1] == 0, "found_inf or counters", 0, 0);

  double scalars[4] = {};
  ClipArgs clip{};
  clip.partials = partials.data();
  clip.partials_numel = chunks;
  clip.count = 2.0;
  clip.scale = 1.0;
  clip.total_norm = {&scalars[0], true};
  clip.clip_coef = {&scalars[1], true};
  clip.multiplier = {&scalars[2], true};
  clip.weight_sum = {&scalars[3], true};
  clip.max_norm = 0.5;
  clip.kind = NormKind::kTwo;
  if (launch_clip(clip, nullptr) != cudaSuccess) return 1;
  expect(std::fabs(scalars[0] - std::sqrt(squares) / 2.0) <= 1e-12 * scalars[0], "norm", 0, 0);

  const double hyper[kHyperColumns] = {1e-2, 0.1, 0.0, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0};
  const std::vector<int32_t> group_ids(tensors, 0);
  std::vector<uint8_t> touched(tensors, 1);
  touched[4] = 0;
  std::vector<float> steps(tensors, 6.0f);
  const RuleScalars<float> rule = rule_scalars<float>(Rule::kAdamW, hyper, 7.0);
  const SourceArgs nothing{nullptr, nullptr, 0, static_cast<int32_t>(tensors), false, false};
  UpdateArgs update{table,
                    rows.data(),
                    hyper,
                    group_ids.data(),
                    touched.data(),
                    steps.data(),
                    {&scalars[2], true},
                    {&found_inf, false},
                    &counters[2],
                    INFINITY,
                    Rule::kAdamW,
                    true};
  std::vector<std::vector<float>> expected(tensors);
  for (int64_t t = 0; t < tensors; ++t) {
    for (int64_t i = 0; i < kSizes[t]; ++i) {
      float value = all.main_params[t][i], first = all.exp_avgs[t][i], second = all.exp_avg_sqs[t][i];
      if (touched[t]) adam<false>(value, sums[t][i] * static_cast<float>(scalars[2]), first, second, rule);
      expected[t].push_back(value);
    }
  }
  if (launch_update(update, nothing, nullptr) != cudaSuccess) return 1;
  for (int64_t t = 0; t < tensors; ++t) {
    expect(steps[t] == (touched[t] ? 7.0f : 6.0f), "step", t, 0);
    for (int64_t i = 0; i < kSizes[t]; ++i) {
      expect(all.main_params[t][i] == expected[t][i], "main param", t, i);
      BFloat16 rounded;
      narrow(expected[t][i], rounded);
      expect(!touched[t] || all.params[t][i].bits == rounded.bits, "parameter", t, i);
    }
  }
  if (failures == 0) std::printf("ok: norm %.9g\n", scalars[0]);
  return failures == 0 ? 0 : 1;
}
