// The end of an engine, and the watchdog that makes sure there is one.
#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "engine.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr std::chrono::milliseconds kPulse(50);
constexpr int64_t kPauseNs = 500'000'000;       // waits look every kPulse: a longer gap is a pause
constexpr int64_t kPatienceNs = 1'000'000'000;  // of looking, before a request counts as stuck
constexpr size_t kNumNamed = 3;                 // requests an error names before it only counts

std::string seconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanoseconds) / 1e9);
  return text;
}

std::string describe(const Outstanding& block) {
  return std::string(op_name(block.op)) + " of " + std::to_string(block.length) +
         " bytes at offset " + std::to_string(block.offset) + " of '" + block.path + "' for " +
         seconds(block.age_ns);
}

// Pre: `blocks` is not empty, oldest first.
IoFailure stuck_failure(const char* op, const std::vector<Outstanding>& blocks,
                        const std::string& after) {
  const Outstanding& oldest = blocks.front();
  std::string why = "no answer from the device; outstanding: ";
  for (size_t i = 0; i < std::min(kNumNamed, blocks.size()); ++i) {
    why += (i > 0 ? ", " : "") + describe(blocks[i]);
  }
  if (blocks.size() > kNumNamed) {
    why += " and " + std::to_string(blocks.size() - kNumNamed) + " others";
  }
  return {ETIMEDOUT, op, oldest.path, oldest.offset, oldest.length, why + after};
}

}  // namespace

std::vector<Outstanding> Engine::outstanding() const {
  const std::lock_guard lanes_lock(lanes_mutex_);
  const std::lock_guard lock(hub_.mutex);
  return outstanding_locked(nullptr);
}

// The blocks of `first` come first, each part oldest first. Pre: both mutexes are held.
std::vector<Outstanding> Engine::outstanding_locked(const Ticket* first) const {
  std::vector<Outstanding> all;
  const int64_t now_ns = os::monotonic_ns();
  for (const auto& [device, lane] : lanes_) {
    const std::vector<Outstanding> some = lane->outstanding(now_ns);
    all.insert(all.end(), some.begin(), some.end());
  }
  std::ranges::sort(all, [first](const Outstanding& a, const Outstanding& b) {
    if ((a.ticket == first) != (b.ticket == first)) return a.ticket == first;
    return a.age_ns > b.age_ns;
  });
  return all;
}

std::optional<IoFailure> Engine::stuck(const Ticket& ticket) const {
  if (config_.stuck_after_s == 0) return std::nullopt;
  const std::lock_guard lanes_lock(lanes_mutex_);
  const std::lock_guard lock(hub_.mutex);
  const int64_t now_ns = os::monotonic_ns();
  // After a pause of the whole process (Ctrl-Z, a suspended job) every age is long, and the answers
  // are on their way: only what stays away while we look is stuck.
  if (now_ns - last_look_ns_ > kPauseNs) looking_since_ns_ = now_ns;
  last_look_ns_ = now_ns;
  const int64_t patience_ns = std::min(config_.stuck_after_ns(), kPatienceNs);
  if (now_ns - looking_since_ns_ < patience_ns) return std::nullopt;
  for (const Part& part : ticket.parts_) {
    if (part.lane->is_stuck(part, now_ns, config_.stuck_after_ns())) {
      return stuck_failure(op_name(ticket.op), outstanding_locked(&ticket), "");
    }
  }
  return std::nullopt;
}

std::vector<Lane*> Engine::lanes() const {
  const std::lock_guard lock(lanes_mutex_);
  std::vector<Lane*> all;
  if (spare_lane_ != nullptr) all.push_back(spare_lane_.get());
  for (const auto& [device, lane] : lanes_) all.push_back(lane.get());
  return all;
}

void Engine::begin_close() {
  Finished finished;
  {
    const std::lock_guard lanes_lock(lanes_mutex_);
    closed_ = true;
    const std::lock_guard lock(hub_.mutex);
    for (const auto& [device, lane] : lanes_) {
      for (const std::shared_ptr<Ticket>& ticket : lane->queued_tickets()) {
        cancel_locked(ticket, "the engine was closed", &finished);
      }
    }
  }
  finished.announce();
  for (Lane* lane : lanes()) lane->release_throttle();
}

bool Engine::wait_idle(std::chrono::nanoseconds time, const std::vector<Lane*>& lanes) {
  std::unique_lock lock(hub_.mutex);
  return hub_.drained.wait_for(lock, time,
                               [&] { return std::ranges::all_of(lanes, &Lane::is_idle); });
}

void Engine::close(const std::function<void()>& pulse) {
  begin_close();
  const std::lock_guard closing(close_mutex_);
  if (stopped_) return;
  int64_t waited_ns = 0;  // a pause of the whole process is no waiting
  int64_t before_ns = os::monotonic_ns();
  while (!wait_idle(kPulse, lanes())) {
    pulse();
    const int64_t now_ns = os::monotonic_ns();
    waited_ns += std::min(now_ns - before_ns, kPauseNs);
    before_ns = now_ns;
    if (config_.stuck_after_s > 0 && waited_ns > config_.stuck_after_ns()) return give_up();
  }
  stop_lanes(lanes());
}

void Engine::give_up() {
  const std::vector<Outstanding> left = outstanding();
  std::vector<Lane*> sound;
  for (Lane* lane : lanes()) {
    if (wait_idle({}, {lane}) || lane->abandon()) sound.push_back(lane);
  }
  abandoned_ = sound.size() < lanes().size();
  while (!wait_idle(kPulse, sound)) continue;  // finished by now, on the way through the lane
  stop_lanes(sound);
  if (left.empty()) return;
  throw stuck_failure(
      "close", left,
      abandoned_ ? "; their memory is left to the kernel and must not be used again" : "");
}

void Engine::stop_lanes(const std::vector<Lane*>& lanes) {
  for (Lane* lane : lanes) lane->stop();
  stopped_ = true;
}

}  // namespace infinity::aio
