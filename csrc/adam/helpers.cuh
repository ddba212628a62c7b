// Sums of squares on the device; the tree of the sum is that of kernel.inl.
#pragma once

#include "segments.cuh"

namespace infinity {
namespace {

constexpr u32 kSquareBlock = 4096;
constexpr u32 kSquareLanes = 16;
constexpr u32 kRows = kSquareBlock / kSquareLanes;
constexpr u32 kUnroll = 16;
constexpr u32 kSquareTile = kSquareBlock * (kThreads / kSquareLanes);
constexpr u32 kFoldThreads = 1024;

// Neighbors first: s[2i] + s[2i+1], and so on, over the values of all threads of a block. Values
// that are missing are +0, which changes no sum of squares. The result is thread 0's.
template <u32 kCount>
INFINITY_FUNCTION double fold_neighbors(double value) {
  __shared__ double of_warp[kWarp];
  constexpr u32 kNumWarps = kCount / kWarp;
  for (u32 step = 1; step < kWarp; step *= 2) value = value + __shfl_xor_sync(kAll, value, step);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = threadIdx.x < kNumWarps ? of_warp[threadIdx.x] : 0.0;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    for (u32 step = 1; step < kNumWarps; step *= 2) {
      value = value + __shfl_xor_sync(kAll, value, step);
    }
  }
  return value;
}

// A thread is one of the 16 lanes of a block of 4096; 16 blocks make a tile and one partial sum.
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
    sum = sum + __shfl_xor_sync(kAll, sum, half);
  }
  // Every lane has its block's sum; neighbors of blocks are 16 threads apart.
  __shared__ double of_block[kThreads / kSquareLanes];
  if (threadIdx.x % kSquareLanes == 0) of_block[threadIdx.x / kSquareLanes] = sum;
  __syncthreads();
  sum = threadIdx.x < kThreads / kSquareLanes ? of_block[threadIdx.x] : 0.0;
  if (threadIdx.x < kWarp) {
    for (u32 step = 1; step < kThreads / kSquareLanes; step *= 2) {
      sum = sum + __shfl_xor_sync(kAll, sum, step);
    }
  }
  if (threadIdx.x == 0) table.partials[blockIdx.x] = sum;
}

// One block of threads folds the partial sums of one segment, 1024 neighbors at a time, in place:
// what round r writes was read in round 0.
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
