// Python module infinity._adam: Pool (worker threads with the kernels of one instruction set) and
// Piece (arguments of one update). The interface is declared in infinity/_adam.pyi. Functions take
// raw addresses and element counts; only read_pieces accesses tensors, through DLPack (tensors.h).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "piece.h"
#include "tensors.h"
#include "topology.h"
#include "workers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace infinity {
namespace {

constexpr std::size_t kChunkElements = 16384;   // per call of a kernel; a multiple of kSquareBlock
constexpr std::size_t kInlineElements = 32768;  // up to this size, one chunk on the calling thread
constexpr std::size_t kCopyChunkBytes = std::size_t{512} << 10;
constexpr std::size_t kMinStreamBytes = std::size_t{8} << 20;  // non-temporal copies from this size

template <class T>
T* pointer(const char* name, Address address, std::size_t n) {
  return static_cast<T*>(checked_address(name, address, n, alignof(T)));
}

CodeArguments code_arguments(std::size_t n, Address values, Address moment, Address scales,
                             int format, bool is_signed) {
  const Format kind = checked_format(format);
  return {pointer<float>("values", values, n),
          checked_address("moment", moment, n, moment_size(kind)),
          pointer<float>("scales", scales, kind == kInt8Moment ? n : 0), kind, is_signed};
}

// All methods may be called from several threads at once, without the GIL. Destruction must not
// overlap with a call; nanobind keeps the object alive during calls.
class Pool {
 public:
  Pool(int num_threads, const std::string& isa, const std::string& root)
      : kernels_(find_kernels(isa)), pid_(getpid()), nodes_(usable_nodes(root)) {
    if (num_threads < 0) throw std::invalid_argument("num_threads must not be negative");
    num_threads_ = num_threads;
    if (num_threads == 0) {
      for (const auto& cpus : nodes_) num_threads_ += static_cast<int>(cpus.size());
    }
    workers_ = new Workers(num_threads_, nodes_);
  }

  // In a forked child the threads do not exist and the mutex may be locked: leak `workers_`.
  ~Pool() {
    if (getpid() == pid_) delete workers_;
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  const char* isa() const { return kernels_->name; }
  const std::vector<std::vector<int>>& nodes() const { return nodes_; }
  const std::vector<std::size_t>& node_of_thread() const { return workers_->node_of_thread(); }

  void close() {
    closed_ = true;
    if (getpid() == pid_) workers_->stop();
  }

  // Runs one job for all pieces, whose chunks are numbered consecutively, so that threads do not
  // wait at the end of each piece.
  void update(const std::vector<const Piece*>& pieces) {
    check_usable();
    std::vector<std::size_t> chunks_before{0};
    std::size_t elements = 0;
    for (const Piece* piece : pieces) {
      const std::size_t n = piece->arguments().n;
      elements += n;
      chunks_before.push_back(chunks_before.back() + (n + kChunkElements - 1) / kChunkElements);
    }
    const std::size_t num_chunks = chunks_before.back();
    const std::size_t step = elements <= kInlineElements ? num_chunks : 1;
    workers_->run(num_chunks, step, [&](std::size_t begin, std::size_t end) {
      auto next = std::upper_bound(chunks_before.begin(), chunks_before.end(), begin);
      for (std::size_t chunk = begin; chunk < end; ++chunk) {
        while (*next <= chunk) ++next;  // also skips empty pieces
        const auto piece = static_cast<std::size_t>(next - chunks_before.begin()) - 1;
        const UpdateArguments& arguments = pieces[piece]->arguments();
        const std::size_t first = (chunk - chunks_before[piece]) * kChunkElements;
        kernels_->update(arguments, first, std::min(first + kChunkElements, arguments.n));
      }
    });
  }

  void accumulate(std::size_t n, Address target, int target_dtype, Address source,
                  int source_dtype) {
    run(n, kernels_->accumulate, pair_arguments(n, target, target_dtype, source, source_dtype));
  }

  void convert(std::size_t n, Address target, int target_dtype, Address source, int source_dtype) {
    run(n, kernels_->convert, pair_arguments(n, target, target_dtype, source, source_dtype));
  }

  double square_sum(std::size_t n, Address source, int source_dtype) {
    check_usable();
    std::vector<double> sums((n + kSquareBlock - 1) / kSquareBlock);
    sum_blocks(n, source, source_dtype, sums.data());
    return fold_blocks(sums);
  }

  void square_blocks(std::size_t n, Address source, int source_dtype, Address sums) {
    check_usable();
    const std::size_t blocks = (n + kSquareBlock - 1) / kSquareBlock;
    sum_blocks(n, source, source_dtype, pointer<double>("sums", sums, blocks));
  }

  double fold_squares(std::size_t n, Address sums) {
    check_usable();
    const double* blocks = pointer<const double>("sums", sums, n);
    std::vector<double> copy(blocks, blocks + n);
    return fold_blocks(copy);
  }

  void split(std::size_t n, Address master, Address weight, Address residual) {
    run(n, kernels_->split, split_arguments(n, master, weight, residual));
  }

  void join(std::size_t n, Address weight, Address residual, Address master) {
    run(n, kernels_->join, split_arguments(n, master, weight, residual));
  }

  void encode(std::size_t n, Address values, Address moment, Address scales, int format,
              bool is_signed) {
    run(n, kernels_->encode, code_arguments(n, values, moment, scales, format, is_signed));
  }

  void decode(std::size_t n, Address values, Address moment, Address scales, int format,
              bool is_signed) {
    run(n, kernels_->decode, code_arguments(n, values, moment, scales, format, is_signed));
  }

  void copy(std::size_t nbytes, Address target, Address source) {
    check_usable();
    auto* to = pointer<char>("target", target, nbytes);
    const auto* from = pointer<const char>("source", source, nbytes);
    const bool stream = nbytes >= kMinStreamBytes;
    workers_->run(nbytes, kCopyChunkBytes, [=](std::size_t begin, std::size_t end) {
      if (stream) {
        stream_copy(to + begin, from + begin, end - begin);
      } else {
        __builtin_memcpy(to + begin, from + begin, end - begin);
      }
    });
  }

 private:
  static PairArguments pair_arguments(std::size_t n, Address target, int target_dtype,
                                      Address source, int source_dtype) {
    const Dtype to = checked_dtype(target_dtype);
    const Dtype from = checked_dtype(source_dtype);
    return {checked_address("target", target, n, size_of(to)),
            checked_address("source", source, n, size_of(from)), to, from};
  }

  static SplitArguments split_arguments(std::size_t n, Address master, Address weight,
                                        Address residual) {
    return {pointer<float>("master", master, n), pointer<std::uint16_t>("weight", weight, n),
            pointer<std::int16_t>("residual", residual, n)};
  }

  // Writes one sum per block of kSquareBlock elements to `sums`.
  void sum_blocks(std::size_t n, Address source, int source_dtype, double* sums) {
    const Dtype dtype = checked_dtype(source_dtype);
    const void* address = checked_address("source", source, n, size_of(dtype));
    const std::size_t blocks = (n + kSquareBlock - 1) / kSquareBlock;
    const SquareArguments arguments{address, dtype, n, sums};
    const std::size_t chunk = n <= kInlineElements ? blocks : kChunkElements / kSquareBlock;
    const auto kernel = kernels_->square_blocks;
    workers_->run(blocks, chunk,
                  [&](std::size_t begin, std::size_t end) { kernel(arguments, begin, end); });
  }

  // Runs an elementwise kernel on [0, n), on the worker threads if `n` is large.
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
          "the pool was created in the parent process, before fork(); create a new Pool in the "
          "child");
    }
  }

  const Kernels* kernels_;
  const pid_t pid_;
  const std::vector<std::vector<int>> nodes_;
  int num_threads_;
  Workers* workers_;
  std::atomic<bool> closed_{false};
};

void check_pieces_apart(const std::vector<const Piece*>& pieces) {
  std::vector<Range> ranges;
  for (const Piece* piece : pieces) {
    for (const Range& range : piece->ranges()) ranges.push_back(range);
  }
  check_apart(std::move(ranges));
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
  return names;
}

}  // namespace
}  // namespace infinity

NB_MODULE(_adam, module) {
  using infinity::Piece;
  using infinity::Pool;
  using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
  nb::set_leak_warnings(false);  // a Pool may live until the interpreter exits
  module.doc() = "Optimizer kernels on raw CPU memory; results are bitwise equal on every CPU.";
  module.attr("BF16") = static_cast<int>(infinity::kBf16);
  module.attr("FP32") = static_cast<int>(infinity::kFp32);
  module.attr("FP16") = static_cast<int>(infinity::kFp16);
  module.def("rules", &infinity::rule_names,
             "Return the names of the rules; the index is the code.");
  module.def("isas", &infinity::isas,
             "Return the instruction sets supported by this CPU, the widest last.");

  module.def("check_apart", &infinity::check_pieces_apart, "pieces"_a,
             "Raise ValueError if memory that a piece writes overlaps other memory of the pieces.");

  nb::class_<Piece>(module, "Piece")
      .def(nb::init<std::size_t, int, int, int, int, std::uint64_t, std::uint64_t, std::uintptr_t,
                    std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t,
                    std::uintptr_t, const std::vector<double>&>(),
           "n"_a, "rule"_a, "layout"_a, "format"_a, "gradient_dtype"_a, "key"_a, "first"_a,
           "weight"_a, "master_state"_a, "moment1"_a, "scales1"_a, "moment2"_a, "scales2"_a,
           "gradient"_a, "scalars"_a);
  module.def("read_pieces", &infinity::read_pieces, "pieces"_a, "settings"_a, "formats"_a,
             "tensor_type"_a, "api"_a,
             "Convert tuples of tensors to pieces; None if any needs the full checks.");

  nb::class_<Pool>(module, "Pool")
      .def(nb::init<int, const std::string&, const std::string&>(), "num_threads"_a = 0,
           "isa"_a = "auto", "root"_a = "/")
      .def_prop_ro("num_threads", &Pool::num_threads)
      .def_prop_ro("isa", &Pool::isa)
      .def_prop_ro("nodes", &Pool::nodes)
      .def_prop_ro("node_of_thread", &Pool::node_of_thread)
      .def("close", &Pool::close, ReleaseGil())
      .def("update", &Pool::update, "pieces"_a, ReleaseGil())
      .def("accumulate", &Pool::accumulate, nb::kw_only(), "n"_a, "target"_a, "target_dtype"_a,
           "source"_a, "source_dtype"_a, ReleaseGil())
      .def("convert", &Pool::convert, nb::kw_only(), "n"_a, "target"_a, "target_dtype"_a,
           "source"_a, "source_dtype"_a, ReleaseGil())
      .def("square_sum", &Pool::square_sum, nb::kw_only(), "n"_a, "source"_a, "source_dtype"_a,
           ReleaseGil())
      .def("square_blocks", &Pool::square_blocks, nb::kw_only(), "n"_a, "source"_a,
           "source_dtype"_a, "sums"_a, ReleaseGil())
      .def("fold_squares", &Pool::fold_squares, nb::kw_only(), "n"_a, "sums"_a, ReleaseGil())
      .def("split", &Pool::split, nb::kw_only(), "n"_a, "master"_a, "weight"_a, "residual"_a,
           ReleaseGil())
      .def("join", &Pool::join, nb::kw_only(), "n"_a, "weight"_a, "residual"_a, "master"_a,
           ReleaseGil())
      .def("encode", &Pool::encode, nb::kw_only(), "n"_a, "values"_a, "moment"_a, "scales"_a,
           "format"_a, "is_signed"_a, ReleaseGil())
      .def("decode", &Pool::decode, nb::kw_only(), "n"_a, "values"_a, "moment"_a, "scales"_a,
           "format"_a, "is_signed"_a, ReleaseGil())
      .def("copy", &Pool::copy, nb::kw_only(), "nbytes"_a, "target"_a, "source"_a, ReleaseGil());
}
