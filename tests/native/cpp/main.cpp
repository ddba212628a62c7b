// Runs all tests, or those whose names contain an argument. SIGALRM ends a test that hangs.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "check.h"

namespace {

constexpr unsigned kHangS = 100;

bool is_wanted(const std::string& name, int count, char** args) {
  for (int i = 1; i < count; ++i) {
    if (name.find(args[i]) != std::string::npos) return true;
  }
  return count == 1;
}

}  // namespace

int main(int count, char** args) {
  using Clock = std::chrono::steady_clock;
  // The first thread may make a sanitizer start another one, and tests count threads.
  std::thread([] {}).join();
  int num_failed = 0;
  int num_run = 0;
  for (const infinity::testing::Case& test : infinity::testing::cases()) {
    if (!is_wanted(test.name, count, args)) continue;
    const auto start = Clock::now();
    ++num_run;
    ::alarm(kHangS);
    std::string problem;
    try {
      test.body();
    } catch (const std::exception& error) {
      problem = error.what();
    }
    ::alarm(0);
    num_failed += problem.empty() ? 0 : 1;
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    std::printf("%s %6.2f s  %s%s%s\n", problem.empty() ? "ok    " : "FAILED", seconds,
                test.name.c_str(), problem.empty() ? "" : ": ", problem.c_str());
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", num_run, num_failed);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}
