// What the kernels are told: static tables, which lie on the device and change only with the parameter set, and per
// launch the addresses of the gradients. No torch, no CUDA header: host code fills these, device code reads them.
#pragma once

#include <cstdint>

#include "../element.h"
#include "../norm_math.h"
#include "../update_math.h"
#include "../update_row.h"

namespace gradacc::cuda {

constexpr int kThreads = 256;     // of a block
constexpr int64_t kSlice = 8192;  // elements that a block takes at a time; kChunk is a multiple of it

// A part of a tensor, and the unit of work: a persistent grid walks over all of them.
struct Slice {
  int64_t start;   // first element
  int32_t tensor;  // index in the list
  int32_t numel;   // 1 to kSlice
};

struct SliceTable {
  const Slice* slices;
  const int64_t* first_of_chunk;  // [chunks + 1]: chunk c is slices first_of_chunk[c] to first_of_chunk[c + 1]
  int64_t count;
  int64_t chunks;
};

struct AccumulateRow {
  void* main_grad;  // Math[], or nullptr where there is none
  int64_t is_double;
};

// A gradient's address with its dtype in the two highest bits, which no address uses; 0: the micro-batch did not reach
// this parameter, or weighs nothing.
using Address = uint64_t;
constexpr int kDtypeShift = 62;

inline Address tagged(const void* data, Dtype dtype) {
  return data ? reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(dtype) << kDtypeShift : 0;
}
GRADACC_HOST_DEVICE Dtype dtype_of_address(Address address) { return static_cast<Dtype>(address >> kDtypeShift); }
GRADACC_HOST_DEVICE const char* data_of(Address address) {
  return reinterpret_cast<const char*>(address & ((uint64_t{1} << kDtypeShift) - 1));
}

// What host code hands over for m micro-batches.
struct SourceArgs {
  const Address* addresses;  // [m][tensors], on the host, or on the device where they are more than a launch takes
  const double* weights;     // [m], on the host or on the device
  int32_t m;
  int32_t tensors;
  bool addresses_on_device;
  bool weights_on_device;
};

// A scalar of one of two types.
struct Cell {
  void* data;
  bool is_double;
};

// A closing pass also takes the norm.
struct NormArgs {
  double* of_slices;  // scratch, one per slice; nullptr: no norm
  double* partials;   // one per chunk; beyond them zeros
  int64_t partials_numel;
  Cell found_inf;
  unsigned* nonfinite;    // scratch, 0 between launches
  unsigned* blocks_done;  // scratch, 0 between launches
  NormKind kind;
};

struct AccumulateArgs {
  SliceTable table;
  const AccumulateRow* rows;
  NormArgs norm;
  bool read;   // the main grad is what the sum starts from
  bool store;  // the sum goes to the main grad
};

struct ClipArgs {
  const double* partials;
  int64_t partials_numel;
  const double* counts;  // on the device; nullptr: count
  int64_t counts_numel;
  double count;
  Cell loss_scale;  // data nullptr: scale
  double scale;
  Cell total_norm, clip_coef, multiplier, weight_sum;
  double max_norm;
  NormKind kind;
};

struct UpdateArgs {
  SliceTable table;
  const UpdateRow* rows;
  const double* hyper;  // [groups, kHyperColumns]
  const int32_t* group_ids;
  const uint8_t* touched;
  float* steps;
  Cell multiplier, found_inf;
  unsigned* blocks_done;  // scratch, 0 between launches
  double max_grad_value;
  Rule rule;
  bool with_buffer;  // sgd: there are momentum buffers
};

}  // namespace gradacc::cuda
