// Persistent thread pool with concurrent callers.
//
// A caller posts a job (a range cut into chunks), processes chunks itself, and idle workers help.
// Jobs of different callers run concurrently; a caller never waits for another caller's job, and
// if no worker is idle it processes its whole job alone. The assignment of chunks to threads is not
// deterministic, so results of `Body` must not depend on it.
//
// [Note: NUMA nodes]
// On a machine with several NUMA nodes the workers are distributed over the nodes and pinned to the
// CPUs of theirs. A job is divided into one contiguous share of chunks per node; the division
// depends only on the job's size. A thread processes the share of its node first, then helps with
// the other shares. Memory that a job of this pool touched first is therefore mostly local to the
// threads that process the same range later. The caller's thread is not pinned. With one node there
// is one share and no thread is pinned.
//
// Workers are started by the first job with more than one chunk. An idle worker spins for 20 us and
// then sleeps, so that it does not compete with torch's threads. Workers block all signals and do
// not call Python.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace infinity {

using Body = std::function<void(std::size_t begin, std::size_t end)>;

// Thread-safe, except for construction and destruction.
class Workers {
 public:
  // `num_threads` includes the calling thread; `nodes` has the CPUs of each NUMA node and must not
  // be empty.
  Workers(int num_threads, std::vector<std::vector<int>> nodes);
  ~Workers() { stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls `body` on disjoint subranges that cover [0, n), and returns when all calls have returned.
  // Subranges begin at multiples of `chunk` and, if there are several, are at most `chunk` long.
  // `body` runs on several threads concurrently and must not throw. With one chunk, or one thread,
  // it is called once, on the calling thread, without locking.
  void run(std::size_t n, std::size_t chunk, const Body& body);

  // Index of the NUMA node of each thread; thread 0 is the caller, whose entry is only nominal.
  const std::vector<std::size_t>& node_of_thread() const { return node_of_thread_; }

  // Joins the worker threads. Jobs in flight are completed by their callers; later jobs run on
  // their callers only. Idempotent.
  void stop();

 private:
  // Contiguous chunks of one node. On a cache line of its own, since `next` is contended.
  struct alignas(64) Share {
    std::atomic<std::size_t> next{0};  // first chunk not taken yet; may exceed `end`
    std::size_t end = 0;
  };

  // Lives on the stack of `run`, which returns only after `num_helpers` is 0.
  struct Job {
    const Body* body;
    std::size_t n;
    std::size_t chunk;
    std::vector<Share> shares;        // one per node
    std::atomic<int> num_helpers{0};  // workers that use this job; written under `mutex_`

    bool exhausted() const;  // all chunks are taken; some may still be running

    // Processes chunks until all are taken, those of `node` first.
    void process_chunks(std::size_t node);
  };

  void start_threads();  // requires `mutex_`
  Job* find_job();       // requires `mutex_`; the job with the fewest helpers, or null
  void worker_loop(std::size_t node);
  std::size_t current_node() const;  // node of the CPU that the calling thread runs on

  const int num_threads_;
  const std::vector<std::vector<int>> nodes_;
  std::vector<std::size_t> node_of_thread_;
  std::mutex mutex_;
  std::condition_variable job_posted_;        // also notified by `stop`
  std::condition_variable helpers_left_;      // some job's `num_helpers` became 0
  std::vector<Job*> jobs_;                    // guarded by `mutex_`
  std::atomic<std::uint64_t> num_posted_{0};  // written under `mutex_`, read without it by spinning
  bool started_ = false;                      // guarded by `mutex_`
  std::atomic<bool> stopping_{false};         // likewise
  std::vector<std::thread> threads_;          // guarded by `mutex_`
};

}  // namespace infinity
