// A persistent thread pool that any number of threads may use at once.
//
// A caller posts a job (a range cut into chunks), works on it itself, and idle workers help. A
// second caller posts a second job and never waits for the first one: with no worker free it simply
// does its own work. Who computes which chunk is left to chance; the kernels do not care.
//
// [Note: memory nodes]
// On a machine with several memory nodes the workers are spread over them and kept there, and a job
// is cut into one contiguous share per node, the same at every call of the same size. A thread
// works on the share of its own node first, and helps with the others after that. So memory that
// this pool touched first is near the threads that come back to it. The caller's thread is never
// moved. With one node there is one share and nobody is pinned.
//
// Workers are started by the first job, spin for a few microseconds after work and then sleep, so
// that torch's own threads get the cores. They block all signals and never touch Python.
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

class Workers {
 public:
  // `num_threads` counts the caller; `nodes` are the CPUs of each memory node.
  Workers(int num_threads, std::vector<std::vector<int>> nodes);
  ~Workers() { stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls `body` on disjoint chunks that cover [0, n); returns when all are done. `body` must not
  // throw. One chunk, or one thread: runs here, without a lock.
  void run(std::size_t n, std::size_t chunk, const Body& body);

  // Of the caller (thread 0, where it is assumed to be) and of every worker.
  const std::vector<std::size_t>& node_of_thread() const { return node_of_thread_; }

  // Joins the threads; a job in flight is finished by its caller. Idempotent.
  void stop();

 private:
  struct alignas(64) Share {
    std::atomic<std::size_t> next{0};  // first chunk nobody has taken
    std::size_t end = 0;
  };

  struct Job {
    const Body* body;
    std::size_t n;
    std::size_t chunk;
    std::vector<Share> shares;    // of chunks, one per node
    std::atomic<int> helpers{0};  // changed under the mutex

    bool exhausted() const;
    void work(std::size_t node);
  };

  void start_threads();  // under the mutex
  Job* find_job();       // under the mutex
  void serve(std::size_t node);
  std::size_t node_here() const;

  const int num_threads_;
  const std::vector<std::vector<int>> nodes_;
  std::vector<std::size_t> node_of_thread_;
  std::mutex mutex_;
  std::condition_variable posted_changed_;
  std::condition_variable helper_left_;
  std::vector<Job*> jobs_;
  std::atomic<std::uint64_t> posted_{0};
  bool started_ = false;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace infinity
