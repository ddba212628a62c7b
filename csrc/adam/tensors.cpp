#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

namespace nb = nanobind;

namespace infinity {
namespace {

constexpr std::size_t kMomentBlock = 128;  // elements per scale; equals kMomentBlock of update.inl

// DLPackExchangeAPI of DLPack 1.x (dlpack.h), which nanobind does not declare. Function pointers
// that are not used here are void*.
struct DLPackExchangeAPI {
  std::uint32_t major;
  std::uint32_t minor;
  const DLPackExchangeAPI* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, nb::dlpack::dltensor* out);
  void* current_work_stream;
};

// DLDataType as one integer: code << 8 | bits.
constexpr unsigned kFloat32 = 2u << 8 | 32, kFloat16 = 2u << 8 | 16, kBfloat16 = 4u << 8 | 16;
constexpr unsigned kInt16 = 0u << 8 | 16, kUint8 = 1u << 8 | 8;

// Thrown for input that the fast path does not accept; does not leave this file.
struct Unsupported {};

// A 1-D contiguous tensor on the CPU.
struct TensorView {
  unsigned type;
  std::size_t n;
  Address address;
};

struct Setting {
  int rule = 0;
  std::size_t num_moments = 0;
  std::vector<double> scalars;
};

class PieceReader {
 public:
  PieceReader(nb::tuple formats, nb::handle tensor_type, nb::handle api)
      : formats_(std::move(formats)), tensor_type_(tensor_type) {
    const void* pointer = PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api");
    const auto* table = static_cast<const DLPackExchangeAPI*>(pointer);
    if (table == nullptr) nb::raise_python_error();
    if (table->major != 1 || table->dltensor_from_py_object_no_sync == nullptr) throw Unsupported{};
    tensor_from_object_ = table->dltensor_from_py_object_no_sync;
  }

  // Parses `setting` once for consecutive pieces that share the object. The caller keeps it alive.
  Piece piece(nb::handle fields, nb::handle setting) {
    if (setting.ptr() != setting_object_) {
      const auto items = nb::cast<nb::tuple>(setting);
      setting_ = {nb::cast<int>(items[0]), nb::cast<std::size_t>(items[1]),
                  nb::cast<std::vector<double>>(items[2])};
      setting_object_ = setting.ptr();
    }
    if (!PyTuple_Check(fields.ptr()) || PyTuple_Size(fields.ptr()) != 9) throw Unsupported{};
    const auto at = [&](int i) { return nb::handle(PyTuple_GetItem(fields.ptr(), i)); };
    const TensorView weight = view_of(at(0));
    const std::size_t n = weight.n;
    TensorView master_state{};
    if (!at(1).is_none()) master_state = view_of(at(1), n);
    const Layout layout = layout_of(weight.type, master_state.type);
    Address moments[2] = {};
    Address scales[2] = {};
    const Format format = read_moments(at(2), n, moments, scales);
    const TensorView gradient = view_of(at(3), n);
    return Piece(n, setting_.rule, layout, format, dtype_of(gradient.type),
                 nb::cast<std::uint64_t>(at(7)), nb::cast<std::uint64_t>(at(8)), weight.address,
                 master_state.address, moments[0], scales[0], moments[1], scales[1],
                 gradient.address, setting_.scalars);
  }

 private:
  TensorView view_of(nb::handle tensor) const {
    // Exact type only: a subclass may override methods that the checked path calls.
    if (static_cast<void*>(Py_TYPE(tensor.ptr())) != tensor_type_.ptr()) throw Unsupported{};
    nb::dlpack::dltensor view;
    if (tensor_from_object_(tensor.ptr(), &view) != 0) nb::raise_python_error();
    const bool on_host = view.device.device_type == nb::device::cpu::value;
    if (!on_host || view.ndim != 1 || view.dtype.lanes != 1) throw Unsupported{};
    if (view.shape[0] > 1 && view.strides != nullptr && view.strides[0] != 1) throw Unsupported{};
    return {unsigned{view.dtype.code} << 8 | view.dtype.bits,
            static_cast<std::size_t>(view.shape[0]),
            reinterpret_cast<Address>(view.data) + view.byte_offset};
  }

  TensorView view_of(nb::handle tensor, std::size_t n) const {
    const TensorView view = view_of(tensor);
    if (view.n != n) throw Unsupported{};
    return view;
  }

  Format read_moments(nb::handle sequence, std::size_t n, Address* values, Address* scales) const {
    const auto moments = nb::cast<nb::sequence>(sequence);
    if (nb::len(moments) != setting_.num_moments) throw Unsupported{};
    Format format = kFp32Moment;
    for (std::size_t k = 0; k < setting_.num_moments; ++k) {
      const nb::object moment = moments[k];
      if (!PyTuple_Check(moment.ptr()) || PyTuple_Size(moment.ptr()) != 3) throw Unsupported{};
      const auto at = [&](int i) { return nb::handle(PyTuple_GetItem(moment.ptr(), i)); };
      const Format moment_format = format_of(at(2));
      if (k > 0 && moment_format != format) throw Unsupported{};
      format = moment_format;
      const TensorView value = view_of(at(0), n);
      if (!is_value_type(format, value.type)) throw Unsupported{};
      values[k] = value.address;
      if (format != kInt8Moment) continue;
      const TensorView scale = view_of(at(1), (n + kMomentBlock - 1) / kMomentBlock);
      if (scale.type != kFloat32) throw Unsupported{};
      scales[k] = scale.address;
    }
    return format;
  }

  Format format_of(nb::handle object) const {
    for (int code = 0; code <= kInt8Moment; ++code) {
      if (PyTuple_GetItem(formats_.ptr(), code) == object.ptr()) return static_cast<Format>(code);
    }
    throw Unsupported{};
  }

  static bool is_value_type(Format format, unsigned type) {
    if (format == kFp32Moment) return type == kFloat32;
    if (format == kInt8Moment) return type == kUint8;
    return type == kBfloat16 || type == kInt16;
  }

  static Layout layout_of(unsigned weight, unsigned master_state) {
    if (weight == kFloat32 && master_state == 0) return kFp32Weight;
    if (weight == kBfloat16 && master_state == kInt16) return kSplitWeight;
    if (weight == kFloat16 && master_state == kFloat32) return kFp16Weight;
    throw Unsupported{};
  }

  static Dtype dtype_of(unsigned type) {
    if (type == kFloat32) return kFp32;
    if (type == kBfloat16) return kBf16;
    if (type == kFloat16) return kFp16;
    throw Unsupported{};
  }

  const nb::tuple formats_;
  const nb::handle tensor_type_;
  int (*tensor_from_object_)(void*, nb::dlpack::dltensor*) = nullptr;
  Setting setting_;
  PyObject* setting_object_ = nullptr;
};

}  // namespace

std::optional<std::vector<Piece>> read_pieces(nb::list pieces, nb::list settings, nb::tuple formats,
                                              nb::handle tensor_type, nb::handle api) {
  try {
    PieceReader reader(std::move(formats), tensor_type, api);
    const std::size_t count = nb::len(pieces);
    if (nb::len(settings) != count) throw Unsupported{};
    std::vector<Piece> native;
    native.reserve(count);
    for (std::size_t i = 0; i < count; ++i) native.push_back(reader.piece(pieces[i], settings[i]));
    return native;
  } catch (const Unsupported&) {
  } catch (const nb::python_error&) {
  } catch (const nb::cast_error&) {
  } catch (const std::invalid_argument&) {
  }
  return std::nullopt;
}

}  // namespace infinity
