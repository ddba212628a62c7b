// The engine: tickets in, spread over one lane per device, blocks out to their back ends.
//
// It knows nothing of Python, tensors or what the bytes mean. Lanes are made on the first use of a
// file on a new device; the first one is made at once, so that a back end that cannot start is
// known early, and given to the first device that is used.
//
// Seams for later: another back end is one more make_...() in backend.h and one more line in
// Lane::start; a smarter order of service is Queue::front.
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

#include "config.h"
#include "lane.h"
#include "ticket.h"

namespace infinity::aio {

struct EngineCounters {
  Counters total;  // busy_ns: with a block in flight on any device
  uint64_t tickets;
  uint64_t leaked_tickets;  // dropped while the kernel held their memory
  uint64_t leaked_bytes;
};

struct DeviceCounters {
  std::string device;  // "major:minor"
  std::string backend;
  Counters counters;
};

class Engine final : public std::enable_shared_from_this<Engine> {
 public:
  // Throws IoFailure, std::invalid_argument. The last owner closes; an engine that had to be
  // abandoned (see close) is never destroyed.
  static std::shared_ptr<Engine> start(const EngineConfig& config);
  ~Engine();  // Pre: closed
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Never blocks on the disk. Throws std::invalid_argument for a segment that cannot work,
  // IoFailure when the engine is closed, or belongs to the parent of this process.
  std::shared_ptr<Ticket> submit(Op op, std::vector<Segment> segments,
                                 Priority priority = Priority::normal);
  EngineCounters counters() const;
  std::vector<DeviceCounters> device_counters() const;
  std::vector<Outstanding> outstanding() const;  // oldest first

  // Refuses and cancels, waits until nothing is in flight, stops the threads. `pulse` is called at
  // least every 50 ms and may throw; call again then. With a watchdog the wait ends after
  // stuck_after_s, and IoFailure says what is outstanding: then blocks that were only held back
  // (faults) come back failed, and what the kernel still has is left to it together with the
  // threads that wait for it. Idempotent.
  void close(const std::function<void()>& pulse);

  // For tickets; see there.
  void promote(Ticket* ticket);
  bool cancel(Ticket* ticket);
  void note_leak(const Ticket& ticket);
  // Set when the kernel has held a block of this ticket, or every block of a device this ticket
  // waits for, for longer than stuck_after_s.
  std::optional<IoFailure> stuck(const Ticket& ticket) const;

  const std::string& backend_name() const { return first_lane_->backend_name(); }
  const std::string& backend_reason() const { return first_lane_->backend_reason(); }
  int process_id() const { return process_id_; }

 private:
  using DeviceKey = std::pair<uint32_t, uint32_t>;

  explicit Engine(const EngineConfig& config);
  static void retire(Engine* engine);

  void check_segment(const Segment& segment, size_t index) const;
  void check_process() const;
  Lane* lane_for(const File& file);
  std::vector<Part> part_by_device(std::vector<Segment> segments);
  void begin_close();
  bool wait_idle(std::chrono::nanoseconds time, const std::vector<Lane*>& lanes);
  std::vector<Lane*> lanes() const;
  void give_up();  // throws what is outstanding
  void stop_lanes(const std::vector<Lane*>& lanes);

  // Hub's mutex held.
  void cancel_locked(const std::shared_ptr<Ticket>& ticket, const char* why, Finished* finished);
  std::vector<Outstanding> outstanding_locked(const Ticket* first) const;

  const EngineConfig config_;
  const int process_id_;

  mutable Hub hub_;
  // Guarded by the hub's mutex.
  uint64_t num_tickets_ = 0;
  uint64_t leaked_tickets_ = 0;
  uint64_t leaked_bytes_ = 0;

  // Guards the lanes' existence. Taken before the hub's.
  mutable std::mutex lanes_mutex_;
  bool closed_ = false;  // no new lanes, no new requests
  std::map<DeviceKey, std::unique_ptr<Lane>> lanes_;
  std::unique_ptr<Lane> spare_lane_;  // the first one, until a device is known
  Lane* first_lane_ = nullptr;

  std::mutex close_mutex_;  // one caller closes; taken before all others
  bool stopped_ = false;
  bool abandoned_ = false;

  // The watchdog looks only while somebody waits. Guarded by hub_.mutex.
  mutable int64_t last_look_ns_ = 0;
  mutable int64_t looking_since_ns_ = 0;
};

}  // namespace infinity::aio
