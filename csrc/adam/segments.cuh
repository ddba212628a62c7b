// Segment tables, the arguments of the device kernels, and vectorized access to their memory.
//
// A table is passed by value as a kernel parameter and describes ranges of many parameters,
// possibly of several groups. The driver copies it when the launch is queued, so there is no
// upload, no host memory that must outlive the call, and no synchronization. A launch of n tiles
// has n thread blocks; a block finds its segment by binary search. infinity/optim/cuda_launch.py
// declares the same structures; sizes and order of the fields must match.
#pragma once

#include "update.inl"

namespace infinity {
namespace {

constexpr u32 kThreads = 256;
constexpr u32 kWarp = 32;
constexpr u32 kWarps = kThreads / kWarp;
constexpr u32 kPerLane = kMomentBlock / kWarp;  // elements of a thread; a warp has one moment block
constexpr u32 kTile = 4096;                     // elements that a thread block updates
constexpr u32 kFullMask = 0xffffffffu;          // all lanes of a warp

static_assert(kPerLane == 4 && kTile % (kWarps * kMomentBlock) == 0);

// A range of one parameter. `first` is the index of its first element inside the parameter.
struct Segment {
  void* weight;
  void* master_state;  // int16 residuals or fp32 masters, by layout; null for fp32 weights
  void* moment1;
  void* moment2;
  float* scales1;
  float* scales2;
  const void* gradient;
  u64 n;
  u64 first;
  u64 key;
  u32 first_tile;  // index of the segment's first tile in the launch
  u16 scalars;     // row of the table's scalars
  u16 wide;        // 1 if all addresses are aligned for vectors of four elements
};
static_assert(sizeof(Segment) == 88);

constexpr u32 kScalars = 10;  // per row: the most that a rule has, and padding to 8 bytes

template <u32 kRows, u32 kSegments>
struct UpdateTable {
  u32 num_segments;
  u32 unused;
  float scalars[kRows][kScalars];
  Segment segments[kSegments];
};

// The limit of kernel parameters is 4 KiB, and 32764 bytes since CUDA 12.1 with a driver for it.
using SmallUpdate = UpdateTable<14, 40>;
using LargeUpdate = UpdateTable<70, 340>;
static_assert(sizeof(SmallUpdate) <= 4096 && sizeof(LargeUpdate) <= 32764);

// A tensor whose squares are summed as defined in passes.inl, [Note: square sum].
struct SumSegment {
  const void* source;
  double* sum;
  u64 n;
  u32 first_tile;
  u32 num_tiles;
};
static_assert(sizeof(SumSegment) == 32);

struct SumTable {
  u32 num_segments;
  u32 unused;
  double* partials;  // one per tile
  SumSegment segments[127];
};
static_assert(sizeof(SumTable) <= 4096);

// Returns the segment of `tile`: the last one with first_tile <= tile.
template <class Table>
INFINITY_FUNCTION u32 find_segment(const Table& table, u32 tile) {
  u32 low = 0;
  u32 high = table.num_segments;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    const bool is_after = table.segments[middle].first_tile > tile;
    high = is_after ? middle : high;
    low = is_after ? low : middle;
  }
  return low;
}

// Four consecutive elements, those of one thread.
template <class T>
struct Four {
  T at[kPerLane];
};

// CUDA's vector type of four T. With these types and __ldcg and __stcg a vector is loaded or stored
// by one instruction. Both bypass the L1 cache, since each element is used once.
template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = float4;
};
template <>
struct VectorOf<u16> {
  using Type = ushort4;
};
template <>
struct VectorOf<i16> {
  using Type = short4;
};
template <>
struct VectorOf<u8> {
  using Type = uchar4;
};

// The elements of one thread: `count` (up to four) from `index`. kVector: four aligned elements,
// which are accessed as one vector.
template <bool kVector>
struct Range {
  u64 index;
  u32 count;  // 4 where kVector
};

template <class T, bool kVector>
INFINITY_FUNCTION Four<T> load_four(const void* from, Range<kVector> range) {
  const T* source = static_cast<const T*>(from) + range.index;
  if constexpr (kVector) {
    const auto four = __ldcg(reinterpret_cast<const typename VectorOf<T>::Type*>(source));
    return {{four.x, four.y, four.z, four.w}};
  } else {
    Four<T> values = {};
    for (u32 i = 0; i < kPerLane; ++i) {
      if (i < range.count) values.at[i] = source[i];
    }
    return values;
  }
}

template <class T, bool kVector>
INFINITY_FUNCTION void store_four(void* to, Range<kVector> range, Four<T> values) {
  T* target = static_cast<T*>(to) + range.index;
  if constexpr (kVector) {
    const auto& at = values.at;
    __stcg(reinterpret_cast<typename VectorOf<T>::Type*>(target), {at[0], at[1], at[2], at[3]});
  } else {
    for (u32 i = 0; i < kPerLane; ++i) {
      if (i < range.count) target[i] = values.at[i];
    }
  }
}

// Element types: conversion between the stored type and fp32.

struct Fp32 {
  using Stored = float;
  static INFINITY_FUNCTION float widen(float value) { return value; }
  static INFINITY_FUNCTION float narrow(float value) { return canonical(value); }
};

struct Bf16 {
  using Stored = u16;
  static INFINITY_FUNCTION float widen(u16 value) { return from_bf16(value); }
  static INFINITY_FUNCTION u16 narrow(float value) { return to_bf16(value); }
};

struct Fp16 {
  using Stored = u16;
  static INFINITY_FUNCTION float widen(u16 value) { return from_fp16(value); }
  static INFINITY_FUNCTION u16 narrow(float value) { return to_fp16(value); }
};

}  // namespace
}  // namespace infinity
