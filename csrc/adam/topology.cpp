#include "topology.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <thread>

namespace infinity {
namespace {

struct CpuSetDeleter {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CpuSet = std::unique_ptr<cpu_set_t, CpuSetDeleter>;

// Returns the CPUs of the calling thread's affinity mask in ascending order; if it cannot be read,
// 0 ... hardware_concurrency() - 1.
std::vector<int> allowed_cpus() {
  // sched_getaffinity fails with EINVAL if the set is smaller than the kernel's mask, whose size is
  // not exposed: retry with larger sets.
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {
    const CpuSet set(CPU_ALLOC(capacity));
    const std::size_t size = CPU_ALLOC_SIZE(capacity);
    CPU_ZERO_S(size, set.get());
    if (sched_getaffinity(0, size, set.get()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    std::vector<int> cpus;
    for (int cpu = 0; cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), size, set.get())) cpus.push_back(cpu);
    }
    if (!cpus.empty()) return cpus;
    break;
  }
  const unsigned count = std::max(1u, std::thread::hardware_concurrency());
  std::vector<int> cpus(count);
  for (unsigned cpu = 0; cpu < count; ++cpu) cpus[cpu] = static_cast<int>(cpu);
  return cpus;
}

// Returns all CPUs of each NUMA node, by node number; empty if `root` has no such directory.
std::map<int, std::vector<int>> read_nodes(const std::string& root) {
  std::map<int, std::vector<int>> nodes;
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::path(root) / "sys/devices/system/node";
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.size() < 5 || name.compare(0, 4, "node") != 0) continue;
    char* end = nullptr;
    const long number = std::strtol(name.c_str() + 4, &end, 10);
    if (*end != '\0' || number < 0 || number > 1 << 16) continue;
    std::ifstream file(entry.path() / "cpulist");
    const std::string text(std::istreambuf_iterator<char>(file), {});
    nodes[static_cast<int>(number)] = parse_cpu_list(text);
  }
  return nodes;
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.c_str();
  while (*at != '\0') {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    if (end == at) {
      ++at;
      continue;
    }
    long last = first;
    if (*end == '-') last = std::strtol(end + 1, &end, 10);
    for (long cpu = first; cpu >= 0 && cpu <= last && cpu < 1 << 20; ++cpu) {
      cpus.push_back(static_cast<int>(cpu));
    }
    at = end;
  }
  return cpus;
}

std::vector<std::vector<int>> usable_nodes(const std::string& root) {
  const std::vector<int> allowed = allowed_cpus();
  std::vector<std::vector<int>> nodes;
  std::size_t num_listed = 0;
  for (const auto& [number, cpus] : read_nodes(root)) {
    std::vector<int> usable;
    for (const int cpu : cpus) {
      if (std::binary_search(allowed.begin(), allowed.end(), cpu)) usable.push_back(cpu);
    }
    num_listed += usable.size();
    if (!usable.empty()) nodes.push_back(std::move(usable));
  }
  // Incomplete or overlapping lists cannot be used to place threads.
  if (num_listed != allowed.size()) return {allowed};
  return nodes;
}

int current_cpu() { return sched_getcpu(); }

bool pin(pthread_t thread, const std::vector<int>& cpus) {
  const int capacity = 1 + *std::max_element(cpus.begin(), cpus.end());
  const CpuSet set(CPU_ALLOC(capacity));
  const std::size_t size = CPU_ALLOC_SIZE(capacity);
  CPU_ZERO_S(size, set.get());
  for (const int cpu : cpus) CPU_SET_S(static_cast<std::size_t>(cpu), size, set.get());
  return pthread_setaffinity_np(thread, size, set.get()) == 0;
}

}  // namespace infinity
