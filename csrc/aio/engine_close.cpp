// Class Engine: shutdown, and the watchdog that bounds waiting for requests that do not complete.
#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "engine.h"
#include "os.h"

namespace infinity::aio {
namespace {

constexpr std::chrono::milliseconds kPollInterval(50);
// Waits poll every kPollInterval. A longer gap than this means that the process was stopped.
constexpr int64_t kMaxPollGapNs = 500'000'000;
constexpr int64_t kMinPollingNs = 1'000'000'000;  // of polling before a request counts as stuck
constexpr size_t kMaxDescribed = 3;               // requests that an error describes

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

// Returns the error for `blocks`, which must not be empty. The first one is reported as its range.
IoFailure stuck_failure(const char* op, const std::vector<Outstanding>& blocks,
                        const std::string& after) {
  const Outstanding& oldest = blocks.front();
  std::string why = "no completion from the device; outstanding: ";
  for (size_t i = 0; i < std::min(kMaxDescribed, blocks.size()); ++i) {
    why += (i > 0 ? ", " : "") + describe(blocks[i]);
  }
  if (blocks.size() > kMaxDescribed) {
    why += " and " + std::to_string(blocks.size() - kMaxDescribed) + " others";
  }
  return {ETIMEDOUT, op, oldest.path, oldest.offset, oldest.length, why + after};
}

}  // namespace

std::vector<Outstanding> Engine::outstanding() const {
  const std::lock_guard lanes_lock(lanes_mutex_);
  const std::lock_guard lock(shared_.mutex);
  return outstanding_locked(nullptr);
}

// The blocks of `first` precede the others; within both groups, the oldest is first.
std::vector<Outstanding> Engine::outstanding_locked(const Ticket* first) const {
  std::vector<Outstanding> all;
  const int64_t now_ns = os::monotonic_ns();
  for (const auto& [device, lane] : lanes_) {
    const std::vector<Outstanding> blocks = lane->outstanding(now_ns);
    all.insert(all.end(), blocks.begin(), blocks.end());
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
  const std::lock_guard lock(shared_.mutex);
  const int64_t now_ns = os::monotonic_ns();
  // After the process was stopped (Ctrl-Z, a suspended job), all ages are too large although the
  // requests may have completed. So a request counts as stuck only after continuous polling.
  if (now_ns - last_poll_ns_ > kMaxPollGapNs) polling_since_ns_ = now_ns;
  last_poll_ns_ = now_ns;
  const int64_t min_polling_ns = std::min(config_.stuck_after_ns(), kMinPollingNs);
  if (now_ns - polling_since_ns_ < min_polling_ns) return std::nullopt;
  for (const SubRequest& sub_request : ticket.sub_requests_) {
    if (sub_request.lane->is_stuck(sub_request, now_ns, config_.stuck_after_ns())) {
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
  CompletedTickets completed;
  {
    const std::lock_guard lanes_lock(lanes_mutex_);
    closed_ = true;
    const std::lock_guard lock(shared_.mutex);
    for (const auto& [device, lane] : lanes_) {
      for (const std::shared_ptr<Ticket>& ticket : lane->queued_tickets()) {
        cancel_locked(ticket, "the engine was closed", &completed);
      }
    }
  }
  completed.notify();
  for (Lane* lane : lanes()) lane->disable_throttle();
}

// Waits up to `time` until `lanes` have no block in flight. Returns false on timeout.
bool Engine::wait_idle(std::chrono::nanoseconds time, const std::vector<Lane*>& lanes) {
  std::unique_lock lock(shared_.mutex);
  return shared_.drained.wait_for(lock, time,
                                  [&] { return std::ranges::all_of(lanes, &Lane::is_idle); });
}

void Engine::close(const std::function<void()>& poll) {
  begin_close();
  const std::lock_guard closing(close_mutex_);
  if (stopped_) return;
  int64_t waited_ns = 0;  // without time during which the process was stopped
  int64_t before_ns = os::monotonic_ns();
  while (!wait_idle(kPollInterval, lanes())) {
    poll();
    const int64_t now_ns = os::monotonic_ns();
    waited_ns += std::min(now_ns - before_ns, kMaxPollGapNs);
    before_ns = now_ns;
    if (config_.stuck_after_s > 0 && waited_ns > config_.stuck_after_ns()) return abandon();
  }
  stop_lanes(lanes());
}

// Stops the lanes that are idle or become so by Lane::abandon(); the others keep their blocks and
// threads, and the engine is marked as abandoned. Throws IoFailure with the blocks that were
// outstanding, if any. Requires close_mutex_.
void Engine::abandon() {
  const std::vector<Outstanding> blocks = outstanding();
  std::vector<Lane*> drained;
  for (Lane* lane : lanes()) {
    if (wait_idle({}, {lane}) || lane->abandon()) drained.push_back(lane);
  }
  abandoned_ = drained.size() < lanes().size();
  while (!wait_idle(kPollInterval, drained)) continue;  // finished blocks pass the sweeper
  stop_lanes(drained);
  if (blocks.empty()) return;
  throw stuck_failure(
      "close", blocks,
      abandoned_ ? "; the kernel still references their memory, which must not be reused" : "");
}

void Engine::stop_lanes(const std::vector<Lane*>& lanes) {
  for (Lane* lane : lanes) lane->stop();
  stopped_ = true;
}

}  // namespace infinity::aio
