// Minimal test framework: TEST, CHECK, CHECK_THROWS. A failed check ends its test.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace infinity::testing {

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Case {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

inline void check(bool passed, const char* what, const char* file, int line,
                  const std::string& detail = {}) {
  if (passed) return;
  throw Failed(std::string(file) + ":" + std::to_string(line) + ": " + what +
               (detail.empty() ? "" : " [" + detail + "]"));
}

}  // namespace infinity::testing

#define TEST(name)                                                              \
  static void name();                                                           \
  static const ::infinity::testing::Registered name##_registered(#name, &name); \
  static void name()

#define CHECK(...) ::infinity::testing::check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
// CHECK with a std::string that is added to the failure message.
#define CHECK_WITH(detail, ...) \
  ::infinity::testing::check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__, (detail))

#define CHECK_THROWS(type, statement)                                             \
  do {                                                                            \
    bool caught = false;                                                          \
    try {                                                                         \
      statement;                                                                  \
    } catch (const type&) {                                                       \
      caught = true;                                                              \
    }                                                                             \
    ::infinity::testing::check(caught, #statement " throws", __FILE__, __LINE__); \
  } while (false)
