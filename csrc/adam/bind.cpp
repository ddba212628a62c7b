// infinity._adam: the Python face. Raw addresses and element counts in, nothing of torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "workers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinity {
namespace {

constexpr std::size_t kChunkElements = 16384;  // a multiple of kSquareBlock
constexpr std::size_t kInlineElements = 32768;
constexpr std::size_t kCopyChunkBytes = std::size_t{512} << 10;
constexpr std::size_t kStreamBytes = std::size_t{8} << 20;

using Address = std::uintptr_t;
using ScalarArray = std::array<double, 9>;

Dtype checked_dtype(int code) {
  if (code == kBf16) return kBf16;
  if (code == kFp32) return kFp32;
  throw std::invalid_argument("unknown dtype code " + std::to_string(code) +
                              "; use _adam.BF16 or _adam.FP32");
}

std::size_t size_of(Dtype dtype) { return dtype == kBf16 ? 2 : 4; }

template <class T>
T* checked_address(const char* name, Address address, std::size_t n, std::size_t alignment) {
  if (address == 0 && n != 0) throw std::invalid_argument(std::string(name) + " is null");
  if (address % alignment != 0) {
    throw std::invalid_argument(std::string(name) + " is not aligned to its element size, " +
                                std::to_string(alignment) + " bytes");
  }
  return reinterpret_cast<T*>(address);
}

int usable_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) return CPU_COUNT(&cpus);
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

AdamScalars to_scalars(const ScalarArray& s) {
  const auto f = [&](std::size_t i) { return static_cast<float>(s[i]); };
  return {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8)};
}

class Pool {
 public:
  Pool(int num_threads, const std::string& isa) : kernels_(find_kernels(isa)), pid_(getpid()) {
    if (num_threads < 0) throw std::invalid_argument("num_threads must not be negative");
    num_threads_ = num_threads == 0 ? usable_cpus() : num_threads;
    workers_ = new Workers(num_threads_);
  }

  // In a forked child the threads do not exist and the locks are in an unknown state: leak them.
  ~Pool() {
    if (getpid() == pid_) delete workers_;
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  const char* isa() const { return kernels_->name; }

  void close() {
    closed_ = true;
    if (getpid() == pid_) workers_->stop();
  }

  void adam(std::size_t n, Address weight, Address residual, Address moment1, Address moment2,
            Address gradient, int gradient_dtype, const ScalarArray& scalars) {
    const Dtype dtype = checked_dtype(gradient_dtype);
    const AdamArguments arguments{
        checked_address<void>("weight", weight, n, residual == 0 ? 4 : 2),
        checked_address<std::int16_t>("residual", residual, 0, 2),
        checked_address<float>("moment1", moment1, n, 4),
        checked_address<float>("moment2", moment2, n, 4),
        checked_address<const void>("gradient", gradient, n, size_of(dtype)),
        dtype,
        to_scalars(scalars)};
    run(n, kernels_->adam, arguments);
  }

  void accumulate(std::size_t n, Address target, int target_dtype, Address source,
                  int source_dtype) {
    run(n, kernels_->accumulate, pair(n, target, target_dtype, source, source_dtype));
  }

  void convert(std::size_t n, Address target, int target_dtype, Address source, int source_dtype) {
    run(n, kernels_->convert, pair(n, target, target_dtype, source, source_dtype));
  }

  double square_sum(std::size_t n, Address source, int source_dtype) {
    check_usable();
    const Dtype dtype = checked_dtype(source_dtype);
    const auto* address = checked_address<const void>("source", source, n, size_of(dtype));
    std::vector<double> sums((n + kSquareBlock - 1) / kSquareBlock);
    const SquareArguments arguments{address, dtype, n, sums.data()};
    const std::size_t chunk = n <= kInlineElements ? sums.size() : kChunkElements / kSquareBlock;
    const auto kernel = kernels_->square_blocks;
    workers_->run(sums.size(), chunk,
                  [&](std::size_t begin, std::size_t end) { kernel(arguments, begin, end); });
    return fold_blocks(sums);
  }

  void split(std::size_t n, Address master, Address weight, Address residual) {
    run(n, kernels_->split, halves(n, master, weight, residual));
  }

  void join(std::size_t n, Address weight, Address residual, Address master) {
    run(n, kernels_->join, halves(n, master, weight, residual));
  }

  void copy(std::size_t nbytes, Address target, Address source) {
    check_usable();
    auto* to = checked_address<char>("target", target, nbytes, 1);
    const auto* from = checked_address<const char>("source", source, nbytes, 1);
    const bool stream = nbytes >= kStreamBytes;
    workers_->run(nbytes, kCopyChunkBytes, [=](std::size_t begin, std::size_t end) {
      if (stream) {
        stream_copy(to + begin, from + begin, end - begin);
      } else {
        __builtin_memcpy(to + begin, from + begin, end - begin);
      }
    });
  }

 private:
  static PairArguments pair(std::size_t n, Address target, int target_dtype, Address source,
                            int source_dtype) {
    const Dtype to = checked_dtype(target_dtype);
    const Dtype from = checked_dtype(source_dtype);
    return {checked_address<void>("target", target, n, size_of(to)),
            checked_address<const void>("source", source, n, size_of(from)), to, from};
  }

  static SplitArguments halves(std::size_t n, Address master, Address weight, Address residual) {
    return {checked_address<float>("master", master, n, 4),
            checked_address<std::uint16_t>("weight", weight, n, 2),
            checked_address<std::int16_t>("residual", residual, n, 2)};
  }

  template <class Arguments>
  void run(std::size_t n, void (*kernel)(const Arguments&, std::size_t, std::size_t),
           const Arguments& arguments) {
    check_usable();
    const std::size_t chunk = n <= kInlineElements ? kInlineElements : kChunkElements;
    workers_->run(n, chunk,
                  [&](std::size_t begin, std::size_t end) { kernel(arguments, begin, end); });
  }

  void check_usable() const {
    if (closed_) throw std::runtime_error("the pool is closed");
    if (getpid() != pid_) {
      throw std::runtime_error(
          "the pool belongs to the parent process (fork); make a new Pool in the child");
    }
  }

  const Kernels* kernels_;
  const pid_t pid_;
  int num_threads_;
  Workers* workers_;
  std::atomic<bool> closed_{false};
};

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace
}  // namespace infinity

NB_MODULE(_adam, module) {
  using infinity::Pool;
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::set_leak_warnings(false);  // a pool that lives until the interpreter ends is no mistake
  module.doc() = "AdamW and its one-pass helpers on raw CPU memory; same bits on every CPU.";
  module.attr("BF16") = static_cast<int>(infinity::kBf16);
  module.attr("FP32") = static_cast<int>(infinity::kFp32);
  module.def("isas", &infinity::isas, "Instruction sets available on this CPU, best last.");

  nb::class_<Pool>(module, "Pool")
      .def(nb::init<int, const std::string&>(), "num_threads"_a = 0, "isa"_a = "auto")
      .def_prop_ro("num_threads", &Pool::num_threads)
      .def_prop_ro("isa", &Pool::isa)
      .def("close", &Pool::close, Release())
      .def("adam", &Pool::adam, nb::kw_only(), "n"_a, "weight"_a, "residual"_a, "moment1"_a,
           "moment2"_a, "gradient"_a, "gradient_dtype"_a, "scalars"_a, Release())
      .def("accumulate", &Pool::accumulate, nb::kw_only(), "n"_a, "target"_a, "target_dtype"_a,
           "source"_a, "source_dtype"_a, Release())
      .def("convert", &Pool::convert, nb::kw_only(), "n"_a, "target"_a, "target_dtype"_a,
           "source"_a, "source_dtype"_a, Release())
      .def("square_sum", &Pool::square_sum, nb::kw_only(), "n"_a, "source"_a, "source_dtype"_a,
           Release())
      .def("split", &Pool::split, nb::kw_only(), "n"_a, "master"_a, "weight"_a, "residual"_a,
           Release())
      .def("join", &Pool::join, nb::kw_only(), "n"_a, "weight"_a, "residual"_a, "master"_a,
           Release())
      .def("copy", &Pool::copy, nb::kw_only(), "nbytes"_a, "target"_a, "source"_a, Release());
}
