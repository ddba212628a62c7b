#include "workers.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "topology.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace infinity {
namespace {

void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `done()` returns true, for at most 20 us: less than waking a sleeping thread takes.
template <class Done>
void spin_until(const Done& done) {
  using Clock = std::chrono::steady_clock;
  const auto limit = Clock::now() + std::chrono::microseconds(20);
  while (!done() && Clock::now() < limit) {
    for (int i = 0; i < 16; ++i) cpu_pause();
  }
}

// Sets the floating-point environment of the calling thread to round-to-nearest without flushing of
// denormals, and restores it on destruction. torch.set_flush_denormal and other libraries may have
// changed it; results must not depend on that.
class ScopedFpEnvironment {
 public:
  ScopedFpEnvironment();
  ~ScopedFpEnvironment();
  ScopedFpEnvironment(const ScopedFpEnvironment&) = delete;
  ScopedFpEnvironment& operator=(const ScopedFpEnvironment&) = delete;

 private:
  unsigned long long saved_;
};

#if defined(__x86_64__)
// 0x1f80 is the reset value of MXCSR: all exceptions masked, round to nearest, no DAZ, no FTZ.
ScopedFpEnvironment::ScopedFpEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
ScopedFpEnvironment::~ScopedFpEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
ScopedFpEnvironment::ScopedFpEnvironment() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" ::"r"(0ULL));
}
ScopedFpEnvironment::~ScopedFpEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
ScopedFpEnvironment::ScopedFpEnvironment() : saved_(0) {}
ScopedFpEnvironment::~ScopedFpEnvironment() = default;
#endif

}  // namespace

Workers::Workers(int num_threads, std::vector<std::vector<int>> nodes)
    : num_threads_(num_threads), nodes_(std::move(nodes)) {
  std::size_t num_cpus = 0;
  for (const auto& cpus : nodes_) num_cpus += cpus.size();
  for (int thread = 0; thread < num_threads; ++thread) {
    // Divide the CPUs, in order of nodes, into num_threads equal intervals. The thread is assigned
    // to the node with the midpoint of its interval, (2 * thread + 1) / (2 * num_threads).
    const auto numerator = static_cast<std::size_t>(2 * thread + 1) * num_cpus;
    std::size_t cpu = numerator / static_cast<std::size_t>(2 * num_threads);
    std::size_t node = 0;
    while (cpu >= nodes_[node].size()) cpu -= nodes_[node++].size();
    node_of_thread_.push_back(node);
  }
}

bool Workers::Job::exhausted() const {
  return std::all_of(shares.begin(), shares.end(), [](const Share& share) {
    return share.next.load(std::memory_order_relaxed) >= share.end;
  });
}

void Workers::Job::process_chunks(std::size_t node) {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    Share& share = shares[(node + i) % shares.size()];
    for (;;) {
      // Relaxed: only atomicity is needed here. `mutex_` orders the job's data before the helpers'
      // work, and that work before the return of `run`.
      const std::size_t index = share.next.fetch_add(1, std::memory_order_relaxed);
      if (index >= share.end) break;
      const std::size_t begin = index * chunk;
      (*body)(begin, std::min(begin + chunk, n));
    }
  }
}

std::size_t Workers::current_node() const {
  if (nodes_.size() == 1) return 0;
  const int cpu = current_cpu();
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    const auto& cpus = nodes_[node];
    if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) return node;
  }
  return 0;
}

void Workers::run(std::size_t n, std::size_t chunk, const Body& body) {
  if (n == 0) return;
  const ScopedFpEnvironment fp_environment;
  const std::size_t num_chunks = (n - 1) / chunk + 1;
  if (num_chunks == 1 || num_threads_ == 1) {
    body(0, n);
    return;
  }
  Job job{&body, n, chunk, std::vector<Share>(nodes_.size())};
  std::size_t threads_before = 0;
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    const auto first_chunk = [&](std::size_t threads) {
      return num_chunks * threads / static_cast<std::size_t>(num_threads_);
    };
    job.shares[node].next = first_chunk(threads_before);
    threads_before +=
        static_cast<std::size_t>(std::count(node_of_thread_.begin(), node_of_thread_.end(), node));
    job.shares[node].end = first_chunk(threads_before);
  }
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      start_threads();
      jobs_.push_back(&job);
      num_posted_.fetch_add(1);
    }
  }
  for (std::size_t i = 1; i < std::min<std::size_t>(num_chunks, num_threads_); ++i) {
    job_posted_.notify_one();
  }
  job.process_chunks(current_node());

  // After its removal from the list no worker can start on the job; wait for those that did. The
  // last one decrements `num_helpers` and notifies under the mutex, so it does not access the job
  // after this thread has acquired the mutex.
  {
    const std::lock_guard lock(mutex_);
    std::erase(jobs_, &job);
  }
  spin_until([&] { return job.num_helpers.load(std::memory_order_acquire) == 0; });
  std::unique_lock lock(mutex_);
  helpers_left_.wait(lock, [&] { return job.num_helpers.load() == 0; });
}

void Workers::stop() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  job_posted_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void Workers::start_threads() {
  if (started_) return;
  started_ = true;
  // New threads inherit the mask: block all signals, so that Python's handlers run elsewhere.
  sigset_t all;
  sigset_t saved;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &saved);
  try {
    for (int i = 1; i < num_threads_; ++i) {
      const std::size_t node = node_of_thread_[static_cast<std::size_t>(i)];
      threads_.emplace_back([this, node] { worker_loop(node); });
      if (nodes_.size() > 1) {
        pin(threads_.back().native_handle(), nodes_[node]);  // a failure affects speed only
      }
    }
  } catch (const std::system_error&) {
    // Thread limit reached: continue with the threads started so far; callers work in any case.
  }
  pthread_sigmask(SIG_SETMASK, &saved, nullptr);
}

Workers::Job* Workers::find_job() {
  Job* best = nullptr;
  for (Job* job : jobs_) {
    if (job->exhausted()) continue;
    if (best == nullptr || job->num_helpers < best->num_helpers) best = job;
  }
  return best;
}

void Workers::worker_loop(std::size_t node) {
  ::pthread_setname_np(::pthread_self(), "infinity-adam");
  const ScopedFpEnvironment fp_environment;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const std::uint64_t num_seen = num_posted_.load();
    if (Job* job = find_job()) {
      ++job->num_helpers;
      lock.unlock();
      job->process_chunks(node);
      lock.lock();
      // The caller may destroy the job once the count is 0 and this thread releases the mutex.
      if (--job->num_helpers == 0) helpers_left_.notify_all();
      continue;
    }
    const auto should_wake = [&] { return stopping_ || num_posted_.load() != num_seen; };
    lock.unlock();
    spin_until(should_wake);
    lock.lock();
    job_posted_.wait(lock, should_wake);
  }
}

}  // namespace infinity
