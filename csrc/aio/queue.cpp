#include "queue.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace infinity::aio {

bool Queue::empty() const { return std::ranges::all_of(classes_, &Class::empty); }

void Queue::push(Entry entry, Priority priority) {
  num_blocks_ += entry.sub_request->num_queued;
  Class& target = classes_[static_cast<size_t>(priority)];
  target.entries[static_cast<size_t>(entry.ticket->op)].push_back(std::move(entry));
}

Queue::Entry Queue::front() {
  turn_ = kNumPriorities;
  for (size_t i = 0; i < kNumPriorities; ++i) {
    if (classes_[i].empty()) continue;
    if (turn_ == kNumPriorities || classes_[i].passed_over >= kMaxPassedOver) turn_ = i;
  }
  assert(turn_ < kNumPriorities);
  Class& chosen = classes_[turn_];
  if (chosen.entries[chosen.direction].empty()) chosen.direction = 1 - chosen.direction;
  return chosen.entries[chosen.direction].front();
}

void Queue::pop_block() {
  for (size_t i = 0; i < kNumPriorities; ++i) {
    classes_[i].passed_over = i == turn_ || classes_[i].empty() ? 0 : classes_[i].passed_over + 1;
  }
  Class& chosen = classes_[turn_];
  std::deque<Entry>& entries = chosen.entries[chosen.direction];
  if (entries.front().sub_request->num_queued == 0) entries.pop_front();
  chosen.direction = 1 - chosen.direction;
  --num_blocks_;
}

template <typename Visit>
bool Queue::find(const SubRequest* sub_request, const Visit& visit) {
  for (Class& priority_class : classes_) {
    for (std::deque<Entry>& entries : priority_class.entries) {
      const auto found = std::ranges::find(entries, sub_request, &Entry::sub_request);
      if (found == entries.end()) continue;
      visit(entries, found);
      return true;
    }
  }
  return false;
}

bool Queue::erase(const SubRequest* sub_request) {
  return find(sub_request, [&](auto& entries, auto found) {
    num_blocks_ -= sub_request->num_queued;
    entries.erase(found);
  });
}

void Queue::promote(const SubRequest* sub_request) {
  find(sub_request, [&](auto& entries, auto found) {
    Entry entry = std::move(*found);
    entries.erase(found);
    classes_[0].entries[static_cast<size_t>(entry.ticket->op)].push_back(std::move(entry));
  });
}

std::vector<std::shared_ptr<Ticket>> Queue::tickets() const {
  std::vector<std::shared_ptr<Ticket>> all;
  for (const Class& priority_class : classes_) {
    for (const std::deque<Entry>& entries : priority_class.entries) {
      for (const Entry& entry : entries) all.push_back(entry.ticket);
    }
  }
  return all;
}

}  // namespace infinity::aio
