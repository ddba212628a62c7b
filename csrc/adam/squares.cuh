// Square sums on the device. The order of additions is that of passes.inl, [Note: square sum], so
// the results are bitwise equal to the CPU's.
#pragma once

#include "segments.cuh"

namespace infinity {
namespace {

constexpr u32 kSquareBlock = 4096;  // elements of a block of the definition
constexpr u32 kSquareLanes = 16;
constexpr u32 kRows = kSquareBlock / kSquareLanes;  // elements per lane of a block
constexpr u32 kUnroll = 16;                         // loads in flight per thread
constexpr u32 kSquareTile = kSquareBlock * (kThreads / kSquareLanes);  // elements per thread block
constexpr u32 kFoldThreads = 1024;

// Reduces the values of the kCount threads of a thread block pairwise: s[i] = s[2i] + s[2i+1].
// Missing values are +0, which does not change a sum of squares. The result is valid in thread 0.
// All threads of the block must call it.
template <u32 kCount>
INFINITY_FUNCTION double fold_neighbors(double value) {
  __shared__ double warp_sums[kWarp];
  constexpr u32 kNumWarps = kCount / kWarp;
  for (u32 step = 1; step < kWarp; step *= 2)
    value = value + __shfl_xor_sync(kFullMask, value, step);
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = threadIdx.x < kNumWarps ? warp_sums[threadIdx.x] : 0.0;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    for (u32 step = 1; step < kNumWarps; step *= 2) {
      value = value + __shfl_xor_sync(kFullMask, value, step);
    }
  }
  return value;
}

// Computes the partial sum of one tile of 16 blocks: steps 2 and 3 of the definition, and the first
// four rounds of step 4. Each thread is one of the 16 lanes of a block of 4096 elements.
template <class Type>
INFINITY_FUNCTION void square_tile(const SumTable& table) {
  using Stored = typename Type::Stored;
  const SumSegment& s = table.segments[find_segment(table, blockIdx.x)];
  const Stored* source = static_cast<const Stored*>(s.source);
  const u64 tile = static_cast<u64>(blockIdx.x - s.first_tile) * kSquareTile;
  const u64 begin = tile + threadIdx.x / kSquareLanes * kSquareBlock + threadIdx.x % kSquareLanes;
  double sum = 0.0;
  for (u32 row = 0; row < kRows; row += kUnroll) {
    Stored stored[kUnroll];
    for (u32 i = 0; i < kUnroll; ++i) {
      const u64 index = begin + (row + i) * kSquareLanes;
      stored[i] = index < s.n ? source[index] : Stored{};
    }
    for (u32 i = 0; i < kUnroll; ++i) {
      const double value = static_cast<double>(Type::widen(stored[i]));
      sum = sum + value * value;
    }
  }
  for (u32 half = kSquareLanes / 2; half > 0; half /= 2) {
    sum = sum + __shfl_xor_sync(kFullMask, sum, half);
  }
  // All 16 lanes of a block have its sum. Reduce the sums of the tile's blocks pairwise.
  __shared__ double block_sums[kThreads / kSquareLanes];
  if (threadIdx.x % kSquareLanes == 0) block_sums[threadIdx.x / kSquareLanes] = sum;
  __syncthreads();
  sum = threadIdx.x < kThreads / kSquareLanes ? block_sums[threadIdx.x] : 0.0;
  if (threadIdx.x < kWarp) {
    for (u32 step = 1; step < kThreads / kSquareLanes; step *= 2) {
      sum = sum + __shfl_xor_sync(kFullMask, sum, step);
    }
  }
  if (threadIdx.x == 0) table.partials[blockIdx.x] = sum;
}

// Reduces the partial sums of one segment, one thread block per segment. Each round reduces groups
// of 1024 sums, in place: group g is written to index g <= 1024 * g, which has been read already.
INFINITY_FUNCTION void fold_partials(const SumTable& table) {
  const SumSegment& s = table.segments[blockIdx.x];
  double* partials = table.partials + s.first_tile;
  for (u32 count = s.num_tiles; count > 1; count = (count + kFoldThreads - 1) / kFoldThreads) {
    for (u32 first = 0; first < count; first += kFoldThreads) {
      const u32 index = first + threadIdx.x;
      const double sum = fold_neighbors<kFoldThreads>(index < count ? partials[index] : 0.0);
      if (threadIdx.x == 0) partials[first / kFoldThreads] = sum;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *s.sum = s.num_tiles == 0 ? 0.0 : partials[0];
}

}  // namespace
}  // namespace infinity
