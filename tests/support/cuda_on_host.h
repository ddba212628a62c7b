// Emulation on a CPU of the CUDA intrinsics that csrc/adam/fused_adam.cu uses.
//
// The threads of a block are fibers on one system thread. A fiber runs until it waits at a barrier
// of its warp (a shuffle) or of its block (__syncthreads); then the next one runs. Blocks run one
// after the other. Misaligned vector accesses and deadlocks, which are errors on a GPU, abort the
// process. Floating-point results have the bits of a GPU: IEEE operations, not fused
// (-ffp-contract=off). Not thread-safe: the state is global.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(count)
#define __shared__ static  // one block runs at a time

struct Index {
  unsigned x;
};
static Index threadIdx;
static Index blockIdx;

namespace emulated {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStack = std::size_t{192} << 10;

// Barrier of a warp or of a block.
struct Barrier {
  unsigned members = 0;
  unsigned arrived = 0;
  unsigned round = 0;
};

struct Warp {
  Barrier barrier;
  // By parity of the round, since a lane may still read the values of the previous one.
  std::uint64_t lane_values[2][kWarp];
};

struct Fiber {
  ucontext_t context;
  bool done;
};

static std::vector<Fiber> fibers;
static std::vector<char> stacks;
static std::vector<Warp> warps;
static Barrier block_barrier;
static ucontext_t scheduler;
static unsigned long progress;  // number of barrier rounds completed and fibers ended
static void (*body)(void**);
static void** body_arguments;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_host: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::abort();
}

inline void arrive_and_wait(Barrier& barrier) {
  const unsigned round = barrier.round;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.round;
    ++progress;
  }
  const unsigned self = threadIdx.x;
  while (barrier.round == round) {
    swapcontext(&fibers[self].context, &scheduler);
  }
}

inline void run_fiber() {
  body(body_arguments);
  fibers[threadIdx.x].done = true;
  ++progress;
}

// Runs the fibers of one block round-robin until all have ended.
inline void run_block(unsigned threads) {
  fibers.resize(threads);
  stacks.resize(threads * kStack);
  warps.assign(threads / kWarp, Warp{});
  for (Warp& warp : warps) warp.barrier.members = kWarp;
  block_barrier = {threads, 0, 0};
  for (unsigned i = 0; i < threads; ++i) {
    ucontext_t& context = fibers[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.data() + i * kStack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = &scheduler;
    makecontext(&context, run_fiber, 0);
    fibers[i].done = false;
  }
  for (bool alive = true; alive;) {
    alive = false;
    const unsigned long before = progress;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].done) continue;
      alive = true;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
    }
    if (alive && progress == before) fail("deadlock: all threads wait at barriers");
  }
}

// Calls a kernel with an array of addresses of its arguments, as cuLaunchKernel does.
template <class... Arguments>
struct Kernel {
  static inline void (*function)(Arguments...);

  template <std::size_t... kIndex>
  static void call(void** values, std::index_sequence<kIndex...>) {
    function(*static_cast<Arguments*>(values[kIndex])...);
  }
  static void call(void** values) { call(values, std::index_sequence_for<Arguments...>{}); }
};

// Runs blocks in descending order: kernels must not depend on the order.
template <class... Arguments>
void run_kernel(void (*kernel)(Arguments...), unsigned blocks, unsigned threads, void** arguments) {
  Kernel<Arguments...>::function = kernel;
  body = Kernel<Arguments...>::call;
  body_arguments = arguments;
  for (unsigned block = blocks; block-- > 0;) {
    blockIdx.x = block;
    run_block(threads);
  }
}

template <class V>
void check_aligned(const V* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(V) != 0) fail("misaligned vector access");
}

}  // namespace emulated

struct float4 {
  float x, y, z, w;
};
struct ushort4 {
  unsigned short x, y, z, w;
};
struct short4 {
  short x, y, z, w;
};
struct uchar4 {
  unsigned char x, y, z, w;
};

template <class V>
V __ldcg(const V* from) {
  emulated::check_aligned(from);
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
struct SameType {
  using Type = V;
};

template <class V>
void __stcg(V* to, typename SameType<V>::Type value) {
  emulated::check_aligned(to);
  std::memcpy(to, &value, sizeof value);
}

inline float __fsqrt_rn(float value) { return __builtin_sqrtf(value); }

inline void __syncthreads() { emulated::arrive_and_wait(emulated::block_barrier); }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned other) {
  if (mask != 0xffffffffu) emulated::fail("shuffles require the full warp mask");
  const unsigned lane = threadIdx.x % emulated::kWarp;
  emulated::Warp& warp = emulated::warps[threadIdx.x / emulated::kWarp];
  std::uint64_t* lane_values = warp.lane_values[warp.barrier.round % 2];
  std::memcpy(&lane_values[lane], &value, sizeof value);
  emulated::arrive_and_wait(warp.barrier);
  std::memcpy(&value, &lane_values[lane ^ other], sizeof value);
  return value;
}
