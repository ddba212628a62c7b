#include "engine.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <iterator>
#include <stdexcept>

#include "os.h"

namespace infinity::aio {
namespace {

constexpr uint64_t kMaxBlockBytes = 1u << 30;  // one system call transfers less than 2 GiB
constexpr uint32_t kMaxDepth = 4096;

uint64_t num_blocks(uint64_t length, uint64_t block_size) {
  return length / block_size + (length % block_size != 0 ? 1 : 0);
}

void check_config(const EngineConfig& config) {
  if (config.block_size == 0 || config.block_size > kMaxBlockBytes) {
    throw std::invalid_argument("block_size must be between 1 and 1073741824 bytes");
  }
  if (config.queue_depth == 0 || config.queue_depth > kMaxDepth) {
    throw std::invalid_argument("queue_depth must be between 1 and 4096");
  }
  if (config.num_threads == 0 || config.num_threads > kMaxDepth) {
    throw std::invalid_argument("num_threads must be between 1 and 4096");
  }
  if (!(config.stuck_after_s >= 0 && config.stuck_after_s <= 1e9)) {
    throw std::invalid_argument("stuck_after_s must be between 0 (no watchdog) and 1e9 seconds");
  }
  if (config.faults.has(Fault::stuck) && config.stuck_after_s == 0) {
    throw std::invalid_argument(
        "faults of kind 'stuck' require a watchdog: set stuck_after_s, or select other kinds");
  }
}

[[noreturn]] void throw_closed() {
  throw IoFailure(ECANCELED, "submit", {}, 0, 0, "the engine is closed");
}

}  // namespace

// Construction, destruction and lanes.

Engine::Engine(const EngineConfig& config) : config_(config), process_id_(os::process_id()) {
  spare_lane_ = std::make_unique<Lane>(shared_, config_);
  first_lane_ = spare_lane_.get();
}

std::shared_ptr<Engine> Engine::start(const EngineConfig& config) {
  check_config(config);
  return {new Engine(config), &Engine::close_and_delete};
}

void Engine::close_and_delete(Engine* engine) {
  // A forked child has none of the threads, and the mutexes may be locked: leak its copy.
  if (engine->process_id_ != os::process_id()) return;
  try {
    engine->close([] {});
  } catch (const IoFailure&) {
    // No caller to report to. Waiters get the error from their tickets.
  }
  if (!engine->abandoned_) {
    delete engine;
    return;
  }
  static std::mutex mutex;
  // Never destroyed: detached threads may use the engines until the process ends.
  static auto* const abandoned = new std::vector<Engine*>;
  const std::lock_guard lock(mutex);
  abandoned->push_back(engine);
}

Engine::~Engine() { assert(stopped_); }

void Engine::check_process() const {
  if (os::process_id() == process_id_) return;
  throw IoFailure(EPERM, "submit", {}, 0, 0,
                  "the engine was created by process " + std::to_string(process_id_) +
                      "; a forked child must create its own");
}

Lane* Engine::lane_for(const File& file) {
  const DeviceKey key{file.device().major, file.device().minor};
  const std::lock_guard lock(lanes_mutex_);
  if (closed_) throw_closed();
  if (const auto found = lanes_.find(key); found != lanes_.end()) return found->second.get();
  std::unique_ptr<Lane> lane = std::move(spare_lane_);
  if (lane == nullptr) lane = std::make_unique<Lane>(shared_, config_);
  return lanes_.emplace(key, std::move(lane)).first->second.get();
}

// Submission and cancellation.

void Engine::check_segment(const Segment& segment, size_t index) const {
  if (segment.length == 0) return;
  const File& file = *segment.file;
  const auto reject = [&](const std::string& why) {
    throw std::invalid_argument(
        "segment " + std::to_string(index) + " (offset " + std::to_string(segment.offset) +
        ", length " + std::to_string(segment.length) + ", address " +
        std::to_string(segment.address) + ") of '" + file.path() + "': " + why);
  };
  if (segment.address == 0) reject("the address is null");
  if (segment.offset > INT64_MAX || segment.length > INT64_MAX - segment.offset) {
    reject("offset + length exceeds 2**63 - 1");
  }
  if (!file.direct()) return;
  const auto require = [&](const char* what, uint64_t value, uint64_t alignment) {
    if (value % alignment == 0) return;
    reject(std::string(what) + " must be a multiple of " + std::to_string(alignment) +
           ", because the file is opened with O_DIRECT");
  };
  require("the offset", segment.offset, file.offset_alignment());
  require("the length", segment.length, file.offset_alignment());
  require("the address", segment.address, file.memory_alignment());
  require("the engine's block_size", config_.block_size, file.offset_alignment());
  require("the engine's block_size", config_.block_size, file.memory_alignment());
}

std::vector<SubRequest> Engine::group_by_device(std::vector<Segment> segments) {
  std::vector<SubRequest> sub_requests;
  for (Segment& segment : segments) {
    if (segment.length == 0) continue;
    Lane* lane = lane_for(*segment.file);
    auto found = std::ranges::find(sub_requests, lane, &SubRequest::lane);
    if (found == sub_requests.end()) {
      sub_requests.emplace_back().lane = lane;
      found = std::prev(sub_requests.end());
    }
    found->num_queued += num_blocks(segment.length, config_.block_size);
    found->segments.push_back(std::move(segment));
  }
  return sub_requests;
}

std::shared_ptr<Ticket> Engine::submit(Op op, std::vector<Segment> segments, Priority priority) {
  check_process();
  auto ticket = std::make_shared<Ticket>(op, priority, process_id_, weak_from_this());
  for (size_t index = 0; index < segments.size(); ++index) {
    check_segment(segments[index], index);
    ticket->nbytes += segments[index].length;
  }
  ticket->sub_requests_ = group_by_device(std::move(segments));
  ticket->submitted_ns_ = os::monotonic_ns();
  CompletedTickets completed;
  std::vector<std::pair<Lane*, size_t>> startable;
  {
    const std::lock_guard lanes_lock(lanes_mutex_);
    if (closed_) throw_closed();
    const std::lock_guard lock(shared_.mutex);
    ++num_tickets_;
    for (SubRequest& sub_request : ticket->sub_requests_) {
      sub_request.lane->enqueue(ticket, &sub_request);
      startable.emplace_back(sub_request.lane, sub_request.lane->num_startable());
    }
    Lane::complete_if_last(ticket, &completed);  // a request without bytes
  }
  completed.notify();
  for (const auto& [lane, count] : startable) {
    if (count > 0) lane->wake(count);
  }
  return ticket;
}

void Engine::promote(Ticket* ticket) {
  const std::lock_guard lock(shared_.mutex);
  if (ticket->priority_ == Priority::urgent) return;
  ticket->priority_ = Priority::urgent;
  for (const SubRequest& sub_request : ticket->sub_requests_) {
    if (sub_request.num_queued > 0) sub_request.lane->promote(&sub_request);
  }
}

bool Engine::cancel(Ticket* ticket) {
  CompletedTickets completed;
  bool is_completed = false;
  {
    const std::lock_guard lock(shared_.mutex);
    cancel_locked(ticket->shared_from_this(), "it was cancelled", &completed);
    is_completed = ticket->completed_;
  }
  completed.notify();
  return is_completed;
}

void Engine::cancel_locked(const std::shared_ptr<Ticket>& ticket, const char* why,
                           CompletedTickets* completed) {
  for (const SubRequest& sub_request : ticket->sub_requests_) {
    if (sub_request.num_queued == 0 || ticket->failure_) continue;
    const Segment& next = sub_request.segments[sub_request.next_segment];
    ticket->failure_.emplace(ECANCELED, op_name(ticket->op), next.file->path(),
                             next.offset + sub_request.next_offset,
                             next.length - sub_request.next_offset, why);
  }
  Lane::cancel_queued(ticket.get());
  Lane::complete_if_last(ticket, completed);
}

void Engine::count_leak(const Ticket& ticket) {
  const std::lock_guard lock(shared_.mutex);
  ++leaked_tickets_;
  leaked_bytes_ += ticket.nbytes;
}

// Counters.

EngineCounters Engine::counters() const {
  const std::lock_guard lanes_lock(lanes_mutex_);
  const std::lock_guard lock(shared_.mutex);
  EngineCounters sum{{}, num_tickets_, leaked_tickets_, leaked_bytes_};
  for (const auto& [device, lane] : lanes_) {
    const Counters counters = lane->counters();
    for (size_t op = 0; op < 2; ++op) {
      sum.total.bytes[op] += counters.bytes[op];
      sum.total.requests[op] += counters.requests[op];
      sum.total.queue_ns[op] += counters.queue_ns[op];
      sum.total.device_ns[op] += counters.device_ns[op];
    }
    sum.total.in_flight_blocks += counters.in_flight_blocks;
    sum.total.queued_blocks += counters.queued_blocks;
  }
  sum.total.busy_ns = shared_.busy_ns;
  if (shared_.in_flight_blocks > 0) sum.total.busy_ns += os::monotonic_ns() - shared_.busy_since_ns;
  return sum;
}

std::vector<DeviceCounters> Engine::device_counters() const {
  const std::lock_guard lanes_lock(lanes_mutex_);
  const std::lock_guard lock(shared_.mutex);
  std::vector<DeviceCounters> list;
  for (const auto& [key, lane] : lanes_) {
    list.push_back({std::to_string(key.first) + ":" + std::to_string(key.second),
                    lane->backend_name(), lane->counters()});
  }
  return list;
}

}  // namespace infinity::aio
