// How work reaches the device kernels: a table of segments, passed by value as kernel parameter.
//
// One launch serves many parameters and groups. The driver copies the table when the launch is
// queued, so nothing is uploaded, nothing has to outlive the call and the host never waits. A
// launch of n tiles has n blocks; a block finds its segment by binary search. Sizes and order of
// the fields are mirrored in infinity/optim/cuda_launch.py.
#pragma once

#include "update.inl"

namespace infinity {
namespace {

constexpr u32 kThreads = 256;
constexpr u32 kWarp = 32;
constexpr u32 kWarps = kThreads / kWarp;
constexpr u32 kPerLane = kMomentBlock / kWarp;  // a warp holds one block of moments
constexpr u32 kTile = 4096;                     // elements of a block of threads
constexpr u32 kAll = 0xffffffffu;

static_assert(kPerLane == 4 && kTile % (kWarps * kMomentBlock) == 0);

// A range of one parameter. `first` is the index of its first element inside the parameter.
struct Segment {
  void* weight;
  void* rest;  // int16 residual or fp32 master, by layout
  void* moment1;
  void* moment2;
  float* scales1;
  float* scales2;
  const void* gradient;
  u64 n;
  u64 first;
  u64 key;
  u32 first_tile;
  u16 scalars;  // which row of the table's scalars
  u16 wide;     // every address allows vectors of four elements
};
static_assert(sizeof(Segment) == 88);

constexpr u32 kScalars = 10;

template <u32 kRows, u32 kSegments>
struct UpdateTable {
  u32 num_segments;
  u32 unused;
  float scalars[kRows][kScalars];
  Segment segments[kSegments];
};

// Kernel parameters hold 4 KiB everywhere, 32764 bytes with CUDA 12.1 and a driver of its age.
using SmallUpdate = UpdateTable<14, 40>;
using LargeUpdate = UpdateTable<70, 340>;
static_assert(sizeof(SmallUpdate) <= 4096 && sizeof(LargeUpdate) <= 32764);

// A tensor whose squares are summed over the tree of kernel.inl.
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

// The segment that holds this block's tile: the last one that does not start behind it.
template <class Table>
INFINITY_FUNCTION u32 find_segment(const Table& table, u32 tile) {
  u32 low = 0;
  u32 high = table.num_segments;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    const bool behind = table.segments[middle].first_tile > tile;
    high = behind ? middle : high;
    low = behind ? low : middle;
  }
  return low;
}

// --- four neighbors at once ---------------------------------------------------------------------

template <class T>
struct Four {
  T at[kPerLane];
};

// CUDA's own vectors and functions: only they are sure to move in one instruction. What passes
// here is used once, hence not kept in the first-level cache.
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

// Which of four neighbors exist, and whether they may be moved as one vector.
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

// --- element types -------------------------------------------------------------------------------

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
