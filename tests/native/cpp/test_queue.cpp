// Tests of the order in which the queue serves requests.
#include <string>
#include <vector>

#include "check.h"
#include "queue.h"

using namespace infinity::aio;

namespace {

// Queue of requests on one device each, named by a letter.
struct NamedQueue {
  Queue queue;
  std::vector<std::unique_ptr<SubRequest>> sub_requests;
  std::string names;

  SubRequest* add(char name, Priority priority, uint64_t num_blocks, Op op = Op::read) {
    sub_requests.push_back(std::make_unique<SubRequest>());
    names += name;
    sub_requests.back()->num_queued = num_blocks;
    queue.push({std::make_shared<Ticket>(op, priority, 0, std::weak_ptr<Engine>{}),
                sub_requests.back().get()},
               priority);
    return sub_requests.back().get();
  }
  char pop_block() {
    const Queue::Entry entry = queue.front();
    --entry.sub_request->num_queued;
    queue.pop_block();
    for (size_t i = 0; i < sub_requests.size(); ++i) {
      if (sub_requests[i].get() == entry.sub_request) return names[i];
    }
    return '?';
  }
  std::string drain() {
    std::string order;
    while (!queue.empty()) order += pop_block();
    return order;
  }
};

}  // namespace

TEST(queue_serves_by_class_then_first_come_first_served) {
  NamedQueue requests;
  requests.add('x', Priority::background, 2);
  requests.add('a', Priority::normal, 2);
  requests.add('b', Priority::normal, 1);
  requests.add('u', Priority::urgent, 2);
  CHECK(requests.queue.num_blocks() == 7);
  CHECK(requests.drain() == "uuaabxx");
  CHECK(requests.queue.num_blocks() == 0);
}

TEST(queue_alternates_directions_within_a_class) {
  NamedQueue requests;
  requests.add('r', Priority::normal, 3);
  requests.add('w', Priority::normal, 2, Op::write);
  requests.add('v', Priority::normal, 2, Op::write);
  requests.add('b', Priority::background, 1, Op::write);
  CHECK(requests.drain() == "rwrwrvvb");
}

TEST(queue_serves_every_class_despite_urgent_requests) {
  NamedQueue requests;
  requests.add('u', Priority::urgent, 1000);
  requests.add('n', Priority::normal, 10);
  requests.add('b', Priority::background, 10);
  const std::string order = requests.drain();
  CHECK(order.find_first_not_of('u') == Queue::kMaxPassedOver);
  const size_t last = order.find_last_not_of('u');
  CHECK_WITH(std::to_string(last), last < 10 * (Queue::kMaxPassedOver + 3));
  CHECK(order.size() == 1020);
}

TEST(queue_promotes_and_erases_requests) {
  NamedQueue requests;
  SubRequest* a = requests.add('a', Priority::normal, 3);
  SubRequest* b = requests.add('b', Priority::background, 3);
  requests.add('c', Priority::background, 1);
  requests.add('u', Priority::urgent, 1);
  CHECK(requests.pop_block() == 'u');
  CHECK(requests.pop_block() == 'a');
  requests.queue.promote(b);
  CHECK(requests.pop_block() == 'b');
  CHECK(requests.queue.erase(a));
  CHECK(!requests.queue.erase(a));
  CHECK(requests.queue.num_blocks() == 3);
  CHECK(requests.drain() == "bbc");
}
