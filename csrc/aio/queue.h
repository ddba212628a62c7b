// Queue of the requests for one device, in three priority classes. Guarded by the engine's mutex.
//
// Blocks are split off the first request of the most urgent class that is not empty. A class that
// has been passed over kMaxPassedOver times in a row is served next, so no class starves. Within a
// class, reads and writes alternate block by block, which is faster than one direction after the
// other (docs/decisions/0006). Within a direction, requests are served in order of submission, or
// of promotion, and a request is split completely before the next one starts.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ticket.h"

namespace infinity::aio {

class Queue {
 public:
  static constexpr uint32_t kMaxPassedOver = 16;

  struct Entry {
    std::shared_ptr<Ticket> ticket;
    SubRequest* sub_request;
  };

  bool empty() const;
  uint64_t num_blocks() const { return num_blocks_; }
  // Requires entry.sub_request->num_queued > 0.
  void push(Entry entry, Priority priority);
  // Returns the request to serve next. The caller splits off one block, decrements num_queued and
  // calls pop_block(). Requires a queue that is not empty.
  Entry front();
  void pop_block();
  // Removes the queued blocks of a request; those in flight are not affected. Returns true if it
  // was in the queue.
  bool erase(const SubRequest* sub_request);
  // Moves a request to the end of the urgent class. No effect if it is not in the queue.
  void promote(const SubRequest* sub_request);
  std::vector<std::shared_ptr<Ticket>> tickets() const;

 private:
  struct Class {
    std::array<std::deque<Entry>, 2> entries;  // by Op
    size_t direction = 0;                      // of the next block, if that deque is not empty
    uint32_t passed_over = 0;                  // consecutive blocks of other classes
    bool empty() const { return entries[0].empty() && entries[1].empty(); }
  };

  // Calls `visit(deque, iterator)` for the entry of `sub_request`. Returns true if it was found.
  template <typename Visit>
  bool find(const SubRequest* sub_request, const Visit& visit);

  std::array<Class, kNumPriorities> classes_;
  size_t turn_ = 0;  // class selected by front()
  uint64_t num_blocks_ = 0;
};

}  // namespace infinity::aio
