// Emulation of torch's CUDA device on the host, for builds of torch without CUDA.
//
// Tensors report device `cuda:0`; their memory is host memory. An operation on tensors of both
// devices raises, as on a GPU, and a backward runs on the autograd thread of the device. Operations
// run synchronously, by the CPU kernels, so results have the bits of the CPU.
//
// Races are detected by vector clocks, one per stream and host thread. Two accesses to overlapping
// memory that are not ordered by synchronization, at least one of them a write, are a violation
// (`hc_violations`): a missing wait, or memory that was reused too early. A thread started by
// Python has a clock of its own; acquiring a lock is ordered after its last release
// (`hc_takes_over`, `hc_hands_over`), and so are waits for events and for disk requests. Internal
// threads of torch, such as autograd's, share the clock of the main thread. Written for torch 2.13.
#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using Address = std::uintptr_t;

// Vector clock, indexed by timeline ("line"): 0 is the main thread, 1 the default stream, then
// other streams and threads.
using Clock = std::vector<std::uint64_t>;

thread_local int host_line = 0;  // timeline of the calling thread

struct Access {
  Address first, end;
  int line;
  std::uint64_t time;
  bool write;
  std::string what;
};

struct Event {
  Clock clock;
  int polls = 0;  // queries until one returns true
  std::chrono::steady_clock::time_point at;
};

struct StreamPool {
  static constexpr std::size_t kSize = 32;
  std::vector<int> lines;
  std::size_t handed_out = 0;
};

// Clocks, recorded accesses and violations. Callers hold `mutex` during every call and access.
struct Tracker {
  std::mutex mutex;
  std::map<int, StreamPool> pools;                     // by priority
  std::vector<Clock> lines{Clock(2, 0), Clock(2, 0)};  // the main thread, the default stream
  std::vector<int> threads{0};                         // lines of running threads
  std::map<std::uint64_t, Clock> released;             // by lock, thread, event or disk request
  std::vector<Access> accesses;
  std::vector<std::string> violations;
  std::map<Address, Address> pinned;  // registered ranges: begin to end
  std::uint32_t seed = 1;
  bool forbids_waits = false;  // `set_sync_debug_mode("error")`

  static void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (std::size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
  }
  static std::uint64_t time_of(const Clock& clock, int line) {
    return static_cast<std::size_t>(line) < clock.size() ? clock[line] : 0;
  }
  int new_line() {
    lines.emplace_back(lines.size() + 1, 0);
    return static_cast<int>(lines.size()) - 1;
  }
  bool is_pinned(Address address) const {
    auto found = pinned.upper_bound(address);
    return found != pinned.begin() && address < std::prev(found)->second;
  }
  // Records a violation if [first, end) is partly inside and partly outside of a registered range.
  void check_registration(Address first, Address end) {
    for (const auto& [start, stop] : pinned)
      if (first < stop && start < end && !(start <= first && end <= stop))
        violations.push_back("copy_ crosses the edge of a registration");
  }
  bool is_thread(int line) const {
    return std::find(threads.begin(), threads.end(), line) != threads.end();
  }
  // Begins an operation on a line, ordered after all previous operations of the calling thread.
  void begin(int line) {
    Clock& clock = lines[line];
    if (line != host_line) join(clock, lines[host_line]);
    if (clock.size() <= static_cast<std::size_t>(line)) clock.resize(line + 1);
    ++clock[line];
  }
  // Records an access of a line, and violations for conflicting accesses not ordered before it.
  void access(int line, Address first, Address end, bool write, const std::string& what) {
    if (first >= end) return;
    const Clock& clock = lines[line];
    for (const Access& other : accesses) {
      if (other.end <= first || end <= other.first || !(write || other.write)) continue;
      if (other.line == line || time_of(clock, other.line) >= other.time) continue;
      std::ostringstream message;
      message << what << (write ? " writes" : " reads") << " on line " << line << " what "
              << other.what << (other.write ? " writes" : " reads") << " on line " << other.line
              << ", bytes " << std::max(first, other.first) << " to " << std::min(end, other.end);
      if (violations.size() < 100) violations.push_back(message.str());
    }
    if (write)  // accesses ordered after this one are ordered after those it covers
      std::erase_if(accesses, [&](const Access& a) { return first <= a.first && a.end <= end; });
    accesses.push_back({first, end, line, clock[line], write, what});
  }
  // Orders the calling thread after `clock`.
  void host_waits(const Clock& clock) {
    join(lines[host_line], clock);
    drop_ordered();
  }
  // Drops accesses that are ordered before all threads: no later access can conflict with them.
  void drop_ordered() {
    std::erase_if(accesses, [&](const Access& a) {
      return std::all_of(threads.begin(), threads.end(), [&](int thread) {
        return thread == a.line || time_of(lines[thread], a.line) >= a.time;
      });
    });
  }
  int random_below(std::uint32_t bound) {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<int>((seed >> 16) % bound);
  }
  // Orders the calling thread after a synchronizing operation; raises if those are forbidden.
  void operation_waits(int line) {
    TORCH_CHECK(!forbids_waits, "called a synchronizing CUDA operation");
    host_waits(lines[line]);
  }
  // Returns whether an event has completed: at random, true after at most `polls` queries.
  bool query(Event& event) {
    bool known = true;
    for (std::size_t i = 0; i < event.clock.size(); ++i)
      known = known && time_of(lines[host_line], static_cast<int>(i)) >= event.clock[i];
    if (known) return true;
    if (--event.polls > 0 && random_below(4) != 0) return false;
    host_waits(event.clock);
    return true;
  }
};

Tracker& tracker() {
  static Tracker* instance = new Tracker;
  return *instance;
}

thread_local int current_line = 1;

int line_of(const c10::Stream& stream) { return static_cast<int>(stream.id()); }

c10::Stream stream_of(int line) {
  return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, 0), line);
}

// Emulation of torch's caching allocator. A segment belongs to a stream and is split into blocks; a
// freed block is merged with its free neighbors and reused on that stream. Segments are released
// only when the limit is reached, and only if they are entirely free, so memory fragments as on a
// GPU.
struct DeviceMemory final : c10::Allocator {
  static constexpr std::size_t kSmall = 1 << 20, kLarge = 10 << 20, kPage = 2 << 20;
  struct Block {
    std::size_t size;
    int line;              // the stream of its segment
    bool is_small;         // its segment is for blocks of up to kSmall
    bool is_free, begins;  // begins: first block of a segment
    Clock freed;           // join of the threads' clocks when it was freed
  };
  std::mutex mutex;
  std::map<Address, Block> all;  // by address; blocks of a segment are adjacent
  std::map<void*, std::vector<Clock>>
      used_by_streams;  // from `record_stream`, which autograd calls
  std::int64_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0, segments = 0, retries = 0;
  std::int64_t limit = INT64_MAX;
  using BlockIterator = std::map<Address, Block>::iterator;

  static std::size_t segment_of(std::size_t size) {
    if (size <= kSmall) return kPage;
    if (size < kLarge) return 2 * kLarge;
    return (size + kPage - 1) / kPage * kPage;
  }
  BlockIterator best_fit(std::size_t size, bool is_small) {
    BlockIterator best = all.end();
    for (BlockIterator at = all.begin(); at != all.end(); ++at) {
      const Block& one = at->second;
      if (!one.is_free || one.line != current_line || one.is_small != is_small) continue;
      if (one.size >= size && (best == all.end() || one.size < best->second.size)) best = at;
    }
    return best;
  }
  bool fits(std::size_t bytes) const {
    return reserved + static_cast<std::int64_t>(bytes) <= limit;
  }
  BlockIterator new_segment(std::size_t size, bool is_small) {
    const std::size_t bytes = segment_of(size);
    if (!fits(bytes)) {
      ++retries;
      release_free_segments();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, fits(bytes), "CUDA out of memory. Tried to allocate ", size,
                     " bytes of ", limit, ", ", reserved - allocated, " reserved but free");
    void* memory = std::aligned_alloc(512, bytes);
    std::memset(memory, 0xff, bytes);
    reserved += static_cast<std::int64_t>(bytes);
    reserved_peak = std::max(reserved_peak, reserved);
    ++segments;
    return all
        .emplace(reinterpret_cast<Address>(memory),
                 Block{bytes, current_line, is_small, true, true, {}})
        .first;
  }
  c10::DataPtr allocate(std::size_t n) override {
    const Device device(DeviceType::CUDA, 0);
    if (n == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    const std::size_t size = (n + 511) / 512 * 512;
    const bool is_small = size <= kSmall;
    std::lock_guard<std::mutex> lock(mutex);
    BlockIterator at = best_fit(size, is_small);
    if (at == all.end()) at = new_segment(size, is_small);
    const std::size_t remainder = at->second.size - size;
    if (remainder > (is_small ? 0 : kSmall)) {  // as in torch, small remainders are not split off
      Block end = at->second;
      end.size = remainder;
      end.begins = false;
      all.emplace(at->first + size, end);
      at->second.size = size;
    }
    at->second.is_free = false;
    {
      std::lock_guard<std::mutex> tracker_lock(tracker().mutex);
      tracker().host_waits(at->second.freed);
    }
    allocated += static_cast<std::int64_t>(at->second.size);
    peak = std::max(peak, allocated);
    void* memory = reinterpret_cast<void*>(at->first);
    return {memory, memory, &DeviceMemory::release, device};
  }
  // Releases segments that are entirely free.
  void release_free_segments() {
    for (BlockIterator at = all.begin(); at != all.end();) {
      const BlockIterator next = std::next(at);
      if (at->second.is_free && at->second.begins && (next == all.end() || next->second.begins)) {
        reserved -= static_cast<std::int64_t>(at->second.size);
        {  // the driver synchronizes the device before it frees memory
          std::lock_guard<std::mutex> tracker_lock(tracker().mutex);
          std::erase_if(tracker().accesses, [&](const Access& one) {
            return at->first <= one.first && one.end <= at->first + at->second.size;
          });
        }
        std::free(reinterpret_cast<void*>(at->first));
        all.erase(at);
      }
      at = next;
    }
  }
  void merge_next(BlockIterator at) {
    const BlockIterator next = std::next(at);
    if (next == all.end() || next->second.begins || !next->second.is_free) return;
    at->second.size += next->second.size;
    Tracker::join(at->second.freed, next->second.freed);
    all.erase(next);
  }
  static void release(void* memory);
  c10::DeleterFnPtr raw_deleter() const override { return &DeviceMemory::release; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }
};

DeviceMemory& device_memory() {
  static DeviceMemory* instance = new DeviceMemory;
  return *instance;
}

void DeviceMemory::release(void* memory) {
  if (memory == nullptr) return;
  DeviceMemory& all = device_memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  BlockIterator at = all.all.find(reinterpret_cast<Address>(memory));
  if (at == all.all.end() || at->second.is_free) return;
  auto users = all.used_by_streams.find(memory);
  if (users != all.used_by_streams.end()) {  // as in torch, reuse is ordered after those streams
    Tracker& t = tracker();
    std::lock_guard<std::mutex> tracker_lock(t.mutex);
    for (const Clock& clock : users->second) Tracker::join(t.lines[at->second.line], clock);
    all.used_by_streams.erase(users);
  }
  std::memset(memory, 0xff, at->second.size);
  all.allocated -= static_cast<std::int64_t>(at->second.size);
  at->second.is_free = true;
  {
    std::lock_guard<std::mutex> tracker_lock(tracker().mutex);
    // Another thread may have released an earlier reference: the reference count orders them.
    for (int thread : tracker().threads) Tracker::join(at->second.freed, tracker().lines[thread]);
  }
  all.merge_next(at);
  if (!at->second.begins && std::prev(at)->second.is_free) all.merge_next(std::prev(at));
}

// Allocator of pinned memory, for `pin_memory=True`.
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(std::size_t n) override {
    void* memory = std::aligned_alloc(4096, (n + 4095) / 4096 * 4096 + 4096);
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    const Address first = reinterpret_cast<Address>(memory);
    t.pinned[first] = first + n;
    return {memory, memory, &PinnedMemory::release, Device(DeviceType::CPU)};
  }
  static void release(void* memory) {
    Tracker& t = tracker();
    {
      std::lock_guard<std::mutex> lock(t.mutex);
      const Address first = reinterpret_cast<Address>(memory);
      // torch reuses pinned memory only after the copies that use it have completed.
      std::erase_if(t.accesses,
                    [&](const Access& a) { return first <= a.first && a.end <= t.pinned[first]; });
      t.pinned.erase(first);
    }
    std::free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(to, from, n);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory& pinned_memory() {
  static PinnedMemory* instance = new PinnedMemory;
  return *instance;
}

// Streams, events and device queries, as torch calls them.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return stream_of(current_line); }
  c10::Stream getDefaultStream(Device) const override { return stream_of(1); }
  // As in torch: a pool of 32 streams per priority, handed out round-robin.
  c10::Stream getNewStream(Device, int priority) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    StreamPool& pool = t.pools[priority];
    if (pool.lines.size() < StreamPool::kSize) pool.lines.push_back(t.new_line());
    return stream_of(pool.lines[pool.handed_out++ % StreamPool::kSize]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int before = current_line;
    current_line = line_of(stream);
    return stream_of(before);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    if (*event == nullptr) *event = new Event;
    t.begin(line_of(stream));
    *static_cast<Event*>(*event) = {t.lines[line_of(stream)], t.random_below(6),
                                    std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    if (event != nullptr)
      Tracker::join(t.lines[line_of(stream)], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    return event == nullptr || t.query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    if (event != nullptr) t.host_waits(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    const auto passed = static_cast<Event*>(end)->at - static_cast<Event*>(begin)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& stream) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    t.host_waits(t.lines[line_of(stream)]);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    for (std::size_t line = 1; line < t.lines.size(); ++line) t.host_waits(t.lines[line]);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Tracker& t = tracker();
    Clock clock;
    {
      std::lock_guard<std::mutex> lock(t.mutex);
      clock = t.lines[line_of(stream)];
    }
    std::lock_guard<std::mutex> lock(device_memory().mutex);
    device_memory().used_by_streams[data.get_context()].push_back(clock);
  }
};

// Registered below as torch's CUDA backend.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  bool isPinnedPtr(const void* data) const override {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    return t.is_pinned(reinterpret_cast<Address>(data));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
};

using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Returns the memory range [begin, end) that the elements of a tensor span.
std::pair<Address, Address> range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return {0, 0};
  const Address first = reinterpret_cast<Address>(tensor.const_data_ptr());
  std::size_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d)
    last +=
        static_cast<std::size_t>(tensor.size(d) - 1) * static_cast<std::size_t>(tensor.stride(d));
  return {first, first + (last + 1) * tensor.itemsize()};
}

// Returns a CPU tensor that shares the memory of a device tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

// Returns a device tensor with a copy of the elements.
at::Tensor to_device(const at::Tensor& host) {
  at::Tensor made =
      at::empty_strided(host.sizes(), host.strides(), host.options().device(at::kCUDA));
  on_host(made).copy_(host);
  return made;
}

struct DeviceArgument {
  at::Tensor device, host;
  bool write;
};

// Conversion of the arguments and results of one operation between the device and the CPU.
struct Call {
  const c10::OperatorHandle& op;
  std::vector<DeviceArgument> device_arguments;
  bool has_host_tensor = false;

  at::Tensor to_host(const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_host_tensor = has_host_tensor || (tensor.dim() > 0 && tensor.device().is_cpu());
      return tensor;
    }
    at::Tensor host = write && tensor.numel() == 0
                          ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU))
                          : on_host(tensor);  // the operation may resize an empty output
    device_arguments.push_back({tensor, host, write});
    return host;
  }

  void arguments_to_host(torch::jit::Stack& stack, std::size_t begin) {
    const auto& arguments = op.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = stack[begin + i];
      const bool write =
          arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
      if (value.isTensor()) {
        value = to_host(value.toTensor(), write);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> host_list;
        for (const at::Tensor& one : value.toTensorVector())
          host_list.push_back(to_host(one, write));
        value = host_list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> host_list;
        for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
          host_list.push_back(one.has_value() ? std::optional<at::Tensor>(to_host(*one, write))
                                              : one);
        value = host_list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        value = Device(DeviceType::CPU);
      }
    }
  }

  // Returns the device tensor for a CPU result: an argument, a view of an argument, or a copy.
  at::Tensor to_result(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const DeviceArgument& one : device_arguments)
      if (result.unsafeGetTensorImpl() == one.host.unsafeGetTensorImpl()) return one.device;
    const Address first = reinterpret_cast<Address>(result.const_data_ptr());
    for (const DeviceArgument& one : device_arguments) {
      const auto [begin, end] = range_of(one.host);
      if (result.numel() && begin <= first && first < end && result.dtype() == one.host.dtype()) {
        const auto offset = static_cast<int64_t>((first - begin) / result.itemsize());
        return one.device.as_strided(result.sizes(), result.strides(),
                                     one.device.storage_offset() + offset);
      }
    }
    return to_device(result);
  }
};

void record_call(const Call& call, bool host_waits) {
  Tracker& t = tracker();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.begin(current_line);
  const std::string name = c10::toString(call.op.operator_name());
  for (const DeviceArgument& one : call.device_arguments) {
    const auto [first, end] = range_of(one.device);
    t.access(current_line, first, end, one.write, name);
  }
  if (host_waits) t.operation_waits(current_line);
}

void record_result(const Call& call, const at::Tensor& made) {
  if (!made.defined() || !made.is_cuda()) return;
  Tracker& t = tracker();
  std::lock_guard<std::mutex> lock(t.mutex);
  t.begin(current_line);  // after the allocation of this memory
  const auto [first, end] = range_of(made);
  t.access(current_line, first, end, true, c10::toString(call.op.operator_name()));
}

// Fallback for all operations: runs the CPU kernel on the same memory, and records the accesses.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::size_t begin = stack->size() - schema.arguments().size();
  Call call{op, {}, false};
  call.arguments_to_host(*stack, begin);
  TORCH_CHECK(
      !(call.has_host_tensor && !call.device_arguments.empty()),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
      "cpu! (in ",
      c10::toString(op.operator_name()), ")");
  bool returns_tensor = schema.returns().empty();
  for (const auto& result : schema.returns())
    returns_tensor = returns_tensor || result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                     result.type()->kind() == c10::TypeKind::ListType;
  record_call(call, !returns_tensor);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const DeviceArgument& one :
       call.device_arguments) {  // an empty output may have been resized
    if (one.write && one.device.numel() == 0 && one.host.numel() > 0) {
      one.device.resize_(one.host.sizes());
      on_host(one.device).copy_(one.host);
    }
  }
  const std::size_t first = stack->size() - schema.returns().size();
  for (std::size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      const at::Tensor on_device = call.to_result(value.toTensor());
      if (schema.returns()[i - first].alias_info() == nullptr) record_result(call, on_device);
      value = on_device;
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> on_device;
      for (const at::Tensor& one : value.toTensorVector()) on_device.push_back(call.to_result(one));
      value = on_device;
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<Device>, std::optional<bool> pin,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, &device_memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<at::MemoryFormat>) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  const std::size_t needed =
      (static_cast<std::size_t>(c10::multiply_integers(size)) + impl->storage_offset()) *
      self.itemsize();
  c10::StorageImpl* storage = impl->storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    c10::DataPtr larger = device_memory().allocate(needed);
    if (storage->nbytes()) std::memcpy(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_source(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  at::Tensor to = self.is_cuda() ? on_host(self) : self,
             from = source.is_cuda() ? on_host(source) : source;
  {
    Tracker& t = tracker();
    std::lock_guard<std::mutex> lock(t.mutex);
    const bool crosses = self.is_cuda() != source.is_cuda();
    const auto [first, end] = range_of(source);
    const auto [to_first, to_end] = range_of(self);
    const bool pinned = t.is_pinned(self.is_cuda() ? first : to_first);
    const bool later = non_blocking && pinned;
    if (crosses)
      t.check_registration(self.is_cuda() ? first : to_first, self.is_cuda() ? end : to_end);
    t.begin(current_line);
    if (source.is_cuda() || later) t.access(current_line, first, end, false, "copy_");
    if (self.is_cuda() || later) t.access(current_line, to_first, to_end, true, "copy_");
    if (crosses && !later && !(self.is_cuda() && non_blocking)) t.operation_waits(current_line);
  }
  to.copy_(from);
  return self;
}

at::Scalar item(const at::Tensor& self) {
  Tracker& t = tracker();
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    t.begin(current_line);
    const auto [first, end] = range_of(self);
    t.access(current_line, first, end, false, "item");
    t.operation_waits(current_line);
  }
  return at::_local_scalar_dense(on_host(self));
}

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                       bool) {
  return 0;  // SDPBackend::math
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_source));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(item));
}

const bool ready = [] {
  c10::SetAllocator(DeviceType::CUDA, &device_memory(), 100);
  at::setHostAllocator(DeviceType::CUDA, &pinned_memory(), 100);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention);
  return true;
}();

}  // namespace

// Functions that tests/support/host_cuda.py calls.
extern "C" {
// Registers host memory as pinned (cudaHostRegister), and removes the registration (0 on success).
void hc_register(void* memory, std::size_t n) {
  std::lock_guard<std::mutex> lock(tracker().mutex);
  const Address first = reinterpret_cast<Address>(memory);
  tracker().pinned[first] = first + n;
}
int hc_unregister(void* memory) {
  std::lock_guard<std::mutex> lock(tracker().mutex);
  return tracker().pinned.erase(reinterpret_cast<Address>(memory)) ? 0 : 1;
}
// Must be called by a Python thread when it begins and when it ends.
void hc_thread_begins() {
  std::lock_guard<std::mutex> lock(tracker().mutex);
  host_line = tracker().new_line();
  tracker().threads.push_back(host_line);
}
void hc_thread_ends() {
  std::lock_guard<std::mutex> lock(tracker().mutex);
  std::erase(tracker().threads, host_line);
}
// Records that the calling thread releases (hands over) or acquires (takes over) the
// synchronization object `what`, a lock, event or disk request.
void hc_hands_over(std::uint64_t what) {
  Tracker& t = tracker();
  std::lock_guard<std::mutex> lock(t.mutex);
  Tracker::join(t.released[what], t.lines[host_line]);
}
void hc_takes_over(std::uint64_t what) {
  Tracker& t = tracker();
  std::lock_guard<std::mutex> lock(t.mutex);
  const auto found = t.released.find(what);
  if (found != t.released.end()) t.host_waits(found->second);
}
// Records an access that is not made by torch: by a kernel on the stream `line`, or by the calling
// thread if `line` is 0.
void hc_access(int line, void* memory, std::size_t n, int write, const char* what) {
  Tracker& t = tracker();
  std::lock_guard<std::mutex> lock(t.mutex);
  if (line == 0) line = host_line;
  t.begin(line);
  const Address first = reinterpret_cast<Address>(memory);
  t.access(line, first, first + n, write != 0, what);
}
// Copies the violations to `into`, one per line, at most n - 1 bytes, and clears them.
void hc_violations(char* into, int n) {
  Tracker& t = tracker();
  std::lock_guard<std::mutex> lock(t.mutex);
  std::string all;
  for (const std::string& one : t.violations) all += one + "\n";
  std::strncpy(into, all.c_str(), static_cast<std::size_t>(n - 1));
  t.violations.clear();
}
// Returns a counter of the allocator, by index.
std::int64_t hc_memory(int what) {
  DeviceMemory& m = device_memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  const std::int64_t known[] = {m.allocated, m.peak,    m.reserved,
                                m.segments,  m.retries, m.reserved_peak};
  return known[what];
}
void hc_reset_peak() {
  std::lock_guard<std::mutex> lock(device_memory().mutex);
  device_memory().peak = device_memory().allocated;
  device_memory().reserved_peak = device_memory().reserved;
}
// Sets the size of the device memory.
void hc_limit(std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(device_memory().mutex);
  device_memory().limit = bytes;
}
// Makes synchronizing operations raise.
void hc_refuse_waits(int yes) {
  std::lock_guard<std::mutex> lock(tracker().mutex);
  tracker().forbids_waits = yes != 0;
}
void hc_empty_cache() {
  std::lock_guard<std::mutex> lock(device_memory().mutex);
  device_memory().release_free_segments();
}
}
