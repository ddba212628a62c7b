// Tests of the thread pool of the CPU optimizer (workers.h) and of the kernel selection
// (dispatch.h).
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "topology.h"
#include "workers.h"

using namespace infinity;

namespace {

// Returns whether every element of the range is processed exactly once.
bool covers(Workers& workers, std::size_t n, std::size_t chunk) {
  std::vector<int> counts(n, 0);
  workers.run(n, chunk, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) ++counts[i];
  });
  for (const int count : counts) {
    if (count != 1) return false;
  }
  return true;
}

}  // namespace

TEST(workers_run_processes_each_element_once) {
  for (const int num_threads : {1, 2, 5}) {
    Workers workers(num_threads, usable_nodes("/"));
    for (const std::size_t n : {1u, 2u, 99u, 1000u, 4096u}) {
      for (const std::size_t chunk : {1u, 7u, 1000u}) CHECK(covers(workers, n, chunk));
    }
  }
}

TEST(workers_run_concurrent_callers_process_each_element_once) {
  Workers workers(4, usable_nodes("/"));
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      for (int turn = 0; turn < 100; ++turn) num_wrong += covers(workers, 500, 16) ? 0 : 1;
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(num_wrong == 0);
}

TEST(workers_stop_during_job_completes_job) {
  for (int turn = 0; turn < 30; ++turn) {
    Workers workers(3, usable_nodes("/"));
    std::atomic<bool> all_covered{true};
    std::thread caller([&] {
      for (int i = 0; i < 10; ++i) {
        if (!covers(workers, 300, 8)) all_covered = false;
      }
    });
    workers.stop();
    caller.join();
    CHECK(all_covered);
    CHECK(covers(workers, 300, 8));  // after the stop, on the caller only
  }
}

TEST(find_kernels_auto_returns_last_and_unknown_throws) {
  CHECK(!available_kernels().empty());
  CHECK(find_kernels("auto") == available_kernels().back());
  CHECK_THROWS(std::invalid_argument, find_kernels("abacus"));
}
