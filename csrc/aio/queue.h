// What waits for one device, in three classes. Guarded by the engine's mutex.
//
// Blocks are cut from the first request of the most urgent class that has one. A class that was
// passed over kPatience times in a row has the next turn, so that none starves. Within a class
// reads and writes take turns block by block, which drives like better than one after the other
// (docs/decisions/0006); within a direction the order is that of submission (of promotion, for
// those that were promoted), and a request is cut to its end before the next one starts.
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
  static constexpr uint32_t kPatience = 16;

  struct Entry {
    std::shared_ptr<Ticket> ticket;
    Part* part;
  };

  bool empty() const;
  uint64_t num_blocks() const { return num_blocks_; }
  // Pre: part->num_queued > 0.
  void push(Entry entry, Priority priority);
  // The request whose turn it is. Pre: not empty. Cut one block of it and call cut().
  Entry front();
  void cut();
  // Drops what is left of a part; what was cut goes on. True: there was something.
  bool erase(const Part* part);
  // Moves a part to the end of the urgent class.
  void promote(const Part* part);
  std::vector<std::shared_ptr<Ticket>> tickets() const;

 private:
  struct Class {
    std::array<std::deque<Entry>, 2> entries;  // by direction
    size_t direction = 0;                      // of the next block, if there is one
    uint32_t passed_over = 0;
    bool empty() const { return entries[0].empty() && entries[1].empty(); }
  };

  // Calls `visit` with each list and the place of `part` in it; true if it was found.
  template <typename Visit>
  bool find(const Part* part, const Visit& visit);

  std::array<Class, kNumPriorities> classes_;
  size_t turn_ = 0;  // class that front() chose
  uint64_t num_blocks_ = 0;
};

}  // namespace infinity::aio
