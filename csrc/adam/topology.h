// CPUs that this process may use, by NUMA node, and thread affinity.
#pragma once

#include <pthread.h>

#include <string>
#include <vector>

namespace infinity {

// Returns the CPUs of the affinity mask, grouped by NUMA node, without empty groups; never empty.
// Nodes are read from `root`/sys (`root` is "/", or a fake tree in tests). If the nodes do not list
// exactly the CPUs of the mask, all CPUs are in one group.
std::vector<std::vector<int>> usable_nodes(const std::string& root);

// Parses a list such as "0-3,8,10-11"; other characters are skipped.
std::vector<int> parse_cpu_list(const std::string& text);

// Returns the CPU that the calling thread runs on, or -1 on failure.
int current_cpu();

// Sets the affinity of `thread` to `cpus`, which must not be empty; false if the system refuses.
bool pin(pthread_t thread, const std::vector<int>& cpus);

}  // namespace infinity
