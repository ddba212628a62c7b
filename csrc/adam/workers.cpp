#include "workers.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "dispatch.h"
#include "topology.h"

namespace infinity {
namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits a little for `done`, as waking a sleeping thread costs more than this.
template <class Done>
void spin_until(const Done& done) {
  using Clock = std::chrono::steady_clock;
  const auto limit = Clock::now() + std::chrono::microseconds(20);
  while (!done() && Clock::now() < limit) {
    for (int i = 0; i < 16; ++i) pause();
  }
}

}  // namespace

Workers::Workers(int num_threads, std::vector<std::vector<int>> nodes)
    : num_threads_(num_threads), nodes_(std::move(nodes)) {
  std::size_t num_cpus = 0;
  for (const auto& cpus : nodes_) num_cpus += cpus.size();
  for (int thread = 0; thread < num_threads; ++thread) {
    // Thread i of n goes where the i-th of n equal parts of the CPUs has its middle.
    const auto twice = static_cast<std::size_t>(2 * thread + 1) * num_cpus;
    std::size_t at = twice / static_cast<std::size_t>(2 * num_threads);
    std::size_t node = 0;
    while (at >= nodes_[node].size()) at -= nodes_[node++].size();
    node_of_thread_.push_back(node);
  }
}

bool Workers::Job::exhausted() const {
  return std::all_of(shares.begin(), shares.end(), [](const Share& share) {
    return share.next.load(std::memory_order_relaxed) >= share.end;
  });
}

void Workers::Job::work(std::size_t node) {
  for (std::size_t i = 0; i < shares.size(); ++i) {
    Share& share = shares[(node + i) % shares.size()];
    for (;;) {
      const std::size_t taken = share.next.fetch_add(1, std::memory_order_relaxed);
      if (taken >= share.end) break;
      const std::size_t begin = taken * chunk;
      (*body)(begin, std::min(begin + chunk, n));
    }
  }
}

std::size_t Workers::node_here() const {
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
  const StandardFloats standard;
  const std::size_t chunks = (n - 1) / chunk + 1;
  if (chunks == 1 || num_threads_ == 1) {
    body(0, n);
    return;
  }
  Job job{&body, n, chunk, std::vector<Share>(nodes_.size())};
  std::size_t threads_before = 0;
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    const auto share_of = [&](std::size_t threads) {
      return chunks * threads / static_cast<std::size_t>(num_threads_);
    };
    job.shares[node].next = share_of(threads_before);
    threads_before +=
        static_cast<std::size_t>(std::count(node_of_thread_.begin(), node_of_thread_.end(), node));
    job.shares[node].end = share_of(threads_before);
  }
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      start_threads();
      jobs_.push_back(&job);
      posted_.fetch_add(1);
    }
  }
  for (std::size_t i = 1; i < std::min<std::size_t>(chunks, num_threads_); ++i) {
    posted_changed_.notify_one();
  }
  job.work(node_here());

  // Nobody can join once the job is off the list; then wait for those who had.
  {
    const std::lock_guard lock(mutex_);
    std::erase(jobs_, &job);
  }
  spin_until([&] { return job.helpers.load(std::memory_order_acquire) == 0; });
  std::unique_lock lock(mutex_);
  helper_left_.wait(lock, [&] { return job.helpers.load() == 0; });
}

void Workers::stop() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  posted_changed_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void Workers::start_threads() {
  if (started_) return;
  started_ = true;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 1; i < num_threads_; ++i) {
      const std::size_t node = node_of_thread_[static_cast<std::size_t>(i)];
      threads_.emplace_back([this, node] { serve(node); });
      if (nodes_.size() > 1) {
        pin(threads_.back().native_handle(), nodes_[node]);  // a refusal costs speed only
      }
    }
  } catch (const std::system_error&) {
    // The machine gives no more threads: the ones there are, and every caller, do the work.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Workers::Job* Workers::find_job() {
  Job* best = nullptr;
  for (Job* job : jobs_) {
    if (job->exhausted()) continue;
    if (best == nullptr || job->helpers < best->helpers) best = job;
  }
  return best;
}

void Workers::serve(std::size_t node) {
  ::pthread_setname_np(::pthread_self(), "infinity-adam");
  const StandardFloats standard;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const std::uint64_t seen = posted_.load();
    if (Job* job = find_job()) {
      ++job->helpers;
      lock.unlock();
      job->work(node);
      lock.lock();
      // The job may be gone as soon as the count is zero and the mutex free.
      if (--job->helpers == 0) helper_left_.notify_all();
      continue;
    }
    const auto roused = [&] { return stopping_ || posted_.load() != seen; };
    lock.unlock();
    spin_until(roused);
    lock.lock();
    posted_changed_.wait(lock, roused);
  }
}

}  // namespace infinity
