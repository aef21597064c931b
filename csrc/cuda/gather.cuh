// Reading and writing elements, 16 bytes at a time where the arrays allow it, and the sum over micro-batches: the one
// place where gradients are summed on the device.
#pragma once

#include <cstring>
#include <type_traits>

#include "launch.h"

namespace gradacc::cuda {

__device__ __forceinline__ bool is_aligned(const void* array, int bytes) {
  return reinterpret_cast<uintptr_t>(array) % bytes == 0;
}

// The compiler cannot know that an address from a table is one of global memory, and takes slower instructions.
template <typename Element>
__device__ __forceinline__ Element* in_global(Element* array) {
  __builtin_assume(__isGlobal(array));
  return array;
}

// Element[kWidth] as it moves, 16 bytes at once where there are so many.
template <typename Element, int kWidth>
struct Vector {
  static constexpr int kBytes = kWidth * static_cast<int>(sizeof(Element));
  static constexpr int kMove = kBytes < 16 ? kBytes : 16;
  using Word = std::conditional_t<kMove == 16, uint4, std::conditional_t<kMove == 8, uint2, uint32_t>>;
  Word words[kBytes / kMove];

  __device__ __forceinline__ void load(const Element* from) {
#pragma unroll
    for (int q = 0; q < kBytes / kMove; ++q) words[q] = reinterpret_cast<const Word*>(from)[q];
  }
  __device__ __forceinline__ void store(Element* to) const {
#pragma unroll
    for (int q = 0; q < kBytes / kMove; ++q) reinterpret_cast<Word*>(to)[q] = words[q];
  }
  __device__ __forceinline__ void get(Element (&out)[kWidth]) const { memcpy(out, words, kBytes); }
  __device__ __forceinline__ void set(const Element (&values)[kWidth]) { memcpy(words, values, kBytes); }
};

// kAligned: the caller knows that the array is aligned; else it is looked at.
template <bool kAligned, typename Element, int kWidth>
__device__ __forceinline__ void load(Element (&out)[kWidth], const Element* from) {
  from = in_global(from);
  if constexpr (kWidth > 1) {
    Vector<Element, kWidth> vector;
    if (kAligned || is_aligned(from, sizeof(vector.words[0]))) {
      vector.load(from);
      vector.get(out);
      return;
    }
  }
  if constexpr (kWidth == 1 || !kAligned) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) out[k] = from[k];
  }
}

template <bool kAligned, typename Element, int kWidth>
__device__ __forceinline__ void store(Element* to, const Element (&values)[kWidth]) {
  to = in_global(to);
  if constexpr (kWidth > 1) {
    Vector<Element, kWidth> vector;
    if (kAligned || is_aligned(to, sizeof(vector.words[0]))) {
      vector.set(values);
      vector.store(to);
      return;
    }
  }
  if constexpr (kWidth == 1 || !kAligned) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) to[k] = values[k];
  }
}

// SourceArgs as a kernel parameter.
template <int64_t kAddresses>
struct Sources {
  const Address* far_addresses;  // nullptr: near_addresses
  const double* far_weights;     // nullptr: near_weights
  int32_t m;
  int32_t tensors;
  double near_weights[kMostWeights];
  Address near_addresses[kAddresses];

  __device__ __forceinline__ Address address(int j, int tensor) const {
    const int64_t k = int64_t{j} * tensors + tensor;
    return far_addresses ? far_addresses[k] : near_addresses[k];
  }
  __device__ __forceinline__ double weight(int j) const { return far_weights ? far_weights[j] : near_weights[j]; }
};

template <int64_t kAddresses>
inline void fill(Sources<kAddresses>& out, const SourceArgs& args) {
  out.far_addresses = args.addresses_on_device ? args.addresses : nullptr;
  out.far_weights = args.weights_on_device ? args.weights : nullptr;
  out.m = args.m;
  out.tensors = args.tensors;
  if (!args.weights_on_device && args.m > 0) memcpy(out.near_weights, args.weights, args.m * sizeof(double));
  const int64_t count = int64_t{args.m} * args.tensors;
  if (!args.addresses_on_device && count > 0) memcpy(out.near_addresses, args.addresses, count * sizeof(Address));
}

// Whether so many addresses and weights travel as a parameter of that size.
inline bool fits(const SourceArgs& args, int64_t addresses) {
  return args.addresses_on_device || int64_t{args.m} * args.tensors <= addresses;
}

// A pass's arguments and its gradients: what its kernel takes.
template <typename Args, int64_t kAddresses>
struct Params : Args {
  Sources<kAddresses> sources;
};

// kKernel takes Params<Args, kAddresses>.
template <auto kKernel, typename Args, int64_t kAddresses>
cudaError_t launch_pass(const Args& args, const SourceArgs& sources, cudaStream_t stream) {
  Params<Args, kAddresses> params;
  static_cast<Args&>(params) = args;
  fill(params.sources, sources);
  return launch_persistent<kKernel>(params, args.table.count > 0 ? args.table.count : 1, stream);
}

// What a slice's gradients are: of any dtypes and alignments, or (the main path) all of one dtype and aligned.
template <typename ElementType>
struct Uniform {
  static constexpr bool kAligned = true;
  using Element = ElementType;
};
struct Mixed {
  static constexpr bool kAligned = false;
};

template <typename Math, typename Element, int kWidth>
__device__ __forceinline__ void add_elements(Math (&sum)[kWidth], Math weight, const Element (&values)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    sum[k] = fused_multiply_add(weight, static_cast<Math>(widen(values[k])), sum[k]);
  }
}

// sum[k] = fma(weight, gradient[i + k], sum[k]) per micro-batch that counts, in order.
template <typename Math, int kWidth, typename Sources>
__device__ __forceinline__ void add_micro_batches(Mixed, Math (&sum)[kWidth], const Sources& from, int tensor,
                                                  int64_t i) {
#pragma unroll 1
  for (int j = 0; j < from.m; ++j) {
    const Address address = from.address(j, tensor);
    const double weight = address ? from.weight(j) : 0.0;
    if (weight == 0.0) continue;
    GRADACC_BY_DTYPE(dtype_of_address(address), {
      Element values[kWidth];
      load<false>(values, reinterpret_cast<const Element*>(data_of(address)) + i);
      add_elements(sum, static_cast<Math>(weight), values);
    })
  }
}

// The loads of several micro-batches are under way at once.
template <typename Element, typename Math, int kWidth, typename Sources>
__device__ __forceinline__ void add_micro_batches(Uniform<Element>, Math (&sum)[kWidth], const Sources& from,
                                                  int tensor, int64_t i) {
  constexpr int kUnderWay = sizeof(Element) > 2 ? 2 : 4;  // registers
#pragma unroll 1
  for (int first = 0; first < from.m; first += kUnderWay) {
    Vector<Element, kWidth> vectors[kUnderWay] = {};  // left undefined, they are spilled
    Math weights[kUnderWay];
    bool counts[kUnderWay];
#pragma unroll
    for (int r = 0; r < kUnderWay; ++r) {
      const Address address = first + r < from.m ? from.address(first + r, tensor) : 0;
      const double weight = address ? from.weight(first + r) : 0.0;
      counts[r] = weight != 0.0;
      weights[r] = static_cast<Math>(weight);
      if (counts[r]) vectors[r].load(in_global(reinterpret_cast<const Element*>(data_of(address)) + i));
    }
#pragma unroll
    for (int r = 0; r < kUnderWay; ++r) {
      if (!counts[r]) continue;
      Element values[kWidth];
      vectors[r].get(values);
      add_elements(sum, weights[r], values);
    }
  }
}

// Whether all gradients of a slice are Element and can be read 16 bytes at a time.
template <typename Element, typename Sources>
__device__ __forceinline__ bool is_uniform(const Sources& from, int tensor, int64_t start) {
  bool uniform = true;
  for (int j = 0; j < from.m; ++j) {
    const Address address = from.address(j, tensor);
    if (!address) continue;
    uniform = uniform && dtype_of_address(address) == dtype_of<Element>() &&
              is_aligned(data_of(address) + start * static_cast<int64_t>(sizeof(Element)), 16);
  }
  return uniform;
}

// What a slice's body is called with: how many elements, and what their gradients are.
template <int kElements, typename GradientKind>
struct Part {
  static constexpr int kWidth = kElements;
  using Kind = GradientKind;
};

// Calls body(Part, i) for a slice's elements: whole vectors, then one by one what is left. Which thread gets which
// element depends on nothing but its index, so a norm has the same bits wherever the arrays lie.
template <int kVector, typename Kind, typename Body>
__device__ __forceinline__ void for_slice(const Slice& slice, const Body& body) {
  const int vectors = slice.numel / kVector;
#pragma unroll 1
  for (int v = threadIdx.x; v < vectors; v += kThreads) body(Part<kVector, Kind>(), slice.start + int64_t{v} * kVector);
  if (static_cast<int>(threadIdx.x) == vectors % kThreads) {
#pragma unroll 1
    for (int i = vectors * kVector; i < slice.numel; ++i) body(Part<1, Mixed>(), slice.start + i);
  }
}

}  // namespace gradacc::cuda
