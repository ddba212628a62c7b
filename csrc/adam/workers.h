// A persistent thread pool that any number of threads may use at once.
//
// A caller posts a job (a range cut into chunks), works on it itself, and idle workers help. A
// second caller posts a second job and never waits for the first one: with no worker free it simply
// does its own work. Who computes which chunk is left to chance; the kernels do not care.
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
  explicit Workers(int num_threads) : num_threads_(num_threads) {}
  ~Workers() { stop(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls `body` on disjoint chunks that cover [0, n); returns when all are done. `body` must not
  // throw. One chunk, or one thread: runs here, without a lock.
  void run(std::size_t n, std::size_t chunk, const Body& body);

  // Joins the threads; a job in flight is finished by its caller. Idempotent.
  void stop();

 private:
  struct Job {
    const Body* body;
    std::size_t n;
    std::size_t chunk;
    std::atomic<std::size_t> next{0};  // first element nobody has taken
    std::atomic<int> helpers{0};       // changed under the mutex

    bool exhausted() const { return next.load(std::memory_order_relaxed) >= n; }
    void work();
  };

  void start_threads();  // under the mutex
  Job* find_job();       // under the mutex
  void serve();

  const int num_threads_;
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
