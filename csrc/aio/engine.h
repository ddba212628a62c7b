// Engine: accepts tickets and distributes them over one lane per device.
//
// A lane is created on the first use of a file on a new device. The first lane is created by
// start(), so that a back end that cannot be set up is reported there; it is then assigned to the
// first device used.
//
// To add a back end, declare another make_...() in backend.h and call it in Lane::start. The order
// of service is decided by Queue::front.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lane.h"
#include "ticket.h"

namespace infinity::aio {

struct EngineCounters {
  Counters total;  // busy_ns: time with a block in flight on any device
  uint64_t tickets;
  uint64_t leaked_tickets;  // dropped while the kernel referenced their memory
  uint64_t leaked_bytes;
};

struct DeviceCounters {
  std::string device;  // "major:minor"
  std::string backend;
  Counters counters;
};

// Thread-safe. Lock order: close_mutex_, lanes_mutex_, shared_.mutex ("the engine's mutex").
class Engine final : public std::enable_shared_from_this<Engine> {
 public:
  // Throws IoFailure or std::invalid_argument. Dropping the last reference closes the engine. An
  // abandoned engine (see close) is never destroyed.
  static std::shared_ptr<Engine> start(const EngineConfig& config);
  ~Engine();  // requires a closed engine
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request; does not wait for I/O. Throws std::invalid_argument for an invalid segment,
  // and IoFailure if the engine is closed or was created by another process.
  std::shared_ptr<Ticket> submit(Op op, std::vector<Segment> segments,
                                 Priority priority = Priority::normal);
  EngineCounters counters() const;
  std::vector<DeviceCounters> device_counters() const;
  std::vector<Outstanding> outstanding() const;  // blocks in flight, oldest first

  // Rejects new requests, cancels queued blocks, waits for blocks in flight and stops the threads.
  // While waiting it calls `poll` every 50 ms. If `poll` throws, the exception is passed on, and
  // close() may be called again. With a watchdog the wait ends after stuck_after_s: blocks held
  // by fault injection then fail; blocks in the kernel, and the threads waiting for them, are
  // abandoned; and IoFailure (ETIMEDOUT) lists what was outstanding. Idempotent.
  void close(const std::function<void()>& poll);

  // Implementation of the methods of Ticket.
  void promote(Ticket* ticket);
  bool cancel(Ticket* ticket);
  void count_leak(const Ticket& ticket);
  // Returns an IoFailure (ETIMEDOUT) if the kernel has held a block of this ticket for longer than
  // stuck_after_s, or every block of a device for which the ticket has blocks queued.
  std::optional<IoFailure> stuck(const Ticket& ticket) const;

  const std::string& backend_name() const { return first_lane_->backend_name(); }
  const std::string& backend_reason() const { return first_lane_->backend_reason(); }
  int process_id() const { return process_id_; }

 private:
  using DeviceKey = std::pair<uint32_t, uint32_t>;  // major, minor

  explicit Engine(const EngineConfig& config);
  static void close_and_delete(Engine* engine);

  void check_segment(const Segment& segment, size_t index) const;
  void check_process() const;
  Lane* lane_for(const File& file);
  std::vector<SubRequest> group_by_device(std::vector<Segment> segments);
  void begin_close();
  bool wait_idle(std::chrono::nanoseconds time, const std::vector<Lane*>& lanes);
  std::vector<Lane*> lanes() const;
  void abandon();
  void stop_lanes(const std::vector<Lane*>& lanes);

  // Require shared_.mutex; outstanding_locked also requires lanes_mutex_.
  void cancel_locked(const std::shared_ptr<Ticket>& ticket, const char* why,
                     CompletedTickets* completed);
  std::vector<Outstanding> outstanding_locked(const Ticket* first) const;

  const EngineConfig config_;
  const int process_id_;

  mutable SharedState shared_;
  // Guarded by shared_.mutex.
  uint64_t num_tickets_ = 0;
  uint64_t leaked_tickets_ = 0;
  uint64_t leaked_bytes_ = 0;

  mutable std::mutex lanes_mutex_;  // guards the next three
  bool closed_ = false;             // no new lanes or requests
  std::map<DeviceKey, std::unique_ptr<Lane>> lanes_;
  std::unique_ptr<Lane> spare_lane_;  // the first lane, until it is assigned to a device
  Lane* first_lane_ = nullptr;        // constant after construction

  std::mutex close_mutex_;  // serializes close(); guards the next two
  bool stopped_ = false;
  bool abandoned_ = false;

  // State of the watchdog, which runs in stuck() only. Guarded by shared_.mutex.
  mutable int64_t last_poll_ns_ = 0;
  mutable int64_t polling_since_ns_ = 0;
};

}  // namespace infinity::aio
