// Which CPUs this process may use, and to which memory node each belongs.
#pragma once

#include <pthread.h>

#include <string>
#include <vector>

namespace infinity {

// The allowed CPUs of every node that has any, never empty. Read below `root` ("/", or a made-up
// machine in a test); a machine that does not tell is one node.
std::vector<std::vector<int>> usable_nodes(const std::string& root);

// The CPUs of a list like "0-3,8,10-11"; anything else in it is skipped.
std::vector<int> parse_cpu_list(const std::string& text);

// The CPU this thread runs on, or -1.
int current_cpu();

// Keeps a thread on `cpus`; false if the system refuses.
bool pin(pthread_t thread, const std::vector<int>& cpus);

}  // namespace infinity
