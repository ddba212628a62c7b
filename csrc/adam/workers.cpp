#include "workers.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "dispatch.h"

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

void Workers::Job::work() {
  for (;;) {
    const std::size_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
    if (begin >= n) return;
    (*body)(begin, std::min(begin + chunk, n));
  }
}

void Workers::run(std::size_t n, std::size_t chunk, const Body& body) {
  if (n == 0) return;
  const StandardFloats standard;
  const std::size_t chunks = (n - 1) / chunk + 1;
  if (chunks == 1 || num_threads_ == 1) {
    body(0, n);
    return;
  }
  Job job{&body, n, chunk};
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
  job.work();

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
    for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this] { serve(); });
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

void Workers::serve() {
  const StandardFloats standard;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const std::uint64_t seen = posted_.load();
    if (Job* job = find_job()) {
      ++job->helpers;
      lock.unlock();
      job->work();
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
