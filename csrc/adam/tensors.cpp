#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

namespace nb = nanobind;

namespace infinity {
namespace {

constexpr std::size_t kBlock = 128;  // elements that share a scale, as in update.inl

// DLPack 1.x, dlpack.h; nanobind has the tensor itself.
struct Exchange {
  std::uint32_t major;
  std::uint32_t minor;
  const Exchange* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);
  void* current_stream;
};

// What DLPack calls a type: code, then bits.
constexpr unsigned kFloat32 = 2u << 8 | 32, kFloat16 = 2u << 8 | 16, kBfloat16 = 4u << 8 | 16;
constexpr unsigned kInt16 = 0u << 8 | 16, kUint8 = 1u << 8 | 8;

struct NotPlain {};

struct Flat {
  unsigned type;
  std::size_t n;
  Address address;
};

struct Setting {
  int rule = 0;
  std::size_t num_moments = 0;
  std::vector<double> scalars;
};

class Reader {
 public:
  Reader(nb::tuple formats, nb::handle tensor_type, nb::handle api)
      : formats_(std::move(formats)), tensor_type_(tensor_type) {
    const void* found = PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api");
    const auto* table = static_cast<const Exchange*>(found);
    if (table == nullptr) nb::raise_python_error();
    if (table->major != 1 || table->tensor_from_object == nullptr) throw NotPlain{};
    tensor_from_object_ = table->tensor_from_object;
  }

  Piece piece(nb::handle given, nb::handle setting) {
    if (setting.ptr() != setting_object_) {
      const auto parts = nb::cast<nb::tuple>(setting);
      setting_ = {nb::cast<int>(parts[0]), nb::cast<std::size_t>(parts[1]),
                  nb::cast<std::vector<double>>(parts[2])};
      setting_object_ = setting.ptr();
    }
    if (!PyTuple_Check(given.ptr()) || PyTuple_Size(given.ptr()) != 9) throw NotPlain{};
    const auto at = [&](int i) { return nb::handle(PyTuple_GetItem(given.ptr(), i)); };
    const Flat weight = flat(at(0));
    const std::size_t n = weight.n;
    Flat rest{};
    if (!at(1).is_none()) rest = flat(at(1), n);
    const Layout layout = layout_of(weight.type, rest.type);
    Address moments[2] = {};
    Address scales[2] = {};
    const Format format = read_moments(at(2), n, moments, scales);
    const Flat gradient = flat(at(3), n);
    return Piece(n, setting_.rule, layout, format, dtype_of(gradient.type),
                 nb::cast<std::uint64_t>(at(7)), nb::cast<std::uint64_t>(at(8)), weight.address,
                 rest.address, moments[0], scales[0], moments[1], scales[1], gradient.address,
                 setting_.scalars);
  }

 private:
  Flat flat(nb::handle tensor) const {
    // Subclasses may answer for themselves.
    if (static_cast<void*>(Py_TYPE(tensor.ptr())) != tensor_type_.ptr()) throw NotPlain{};
    nb::dlpack::dltensor seen;
    if (tensor_from_object_(tensor.ptr(), &seen) != 0) nb::raise_python_error();
    const bool on_host = seen.device.device_type == nb::device::cpu::value;
    if (!on_host || seen.ndim != 1 || seen.dtype.lanes != 1) throw NotPlain{};
    if (seen.shape[0] > 1 && seen.strides != nullptr && seen.strides[0] != 1) throw NotPlain{};
    return {unsigned{seen.dtype.code} << 8 | seen.dtype.bits,
            static_cast<std::size_t>(seen.shape[0]),
            reinterpret_cast<Address>(seen.data) + seen.byte_offset};
  }

  Flat flat(nb::handle tensor, std::size_t n) const {
    const Flat found = flat(tensor);
    if (found.n != n) throw NotPlain{};
    return found;
  }

  Format read_moments(nb::handle given, std::size_t n, Address* values, Address* scales) const {
    const auto moments = nb::cast<nb::sequence>(given);
    if (nb::len(moments) != setting_.num_moments) throw NotPlain{};
    Format format = kFp32Moment;
    for (std::size_t k = 0; k < setting_.num_moments; ++k) {
      const nb::object moment = moments[k];
      if (!PyTuple_Check(moment.ptr()) || PyTuple_Size(moment.ptr()) != 3) throw NotPlain{};
      const auto at = [&](int i) { return nb::handle(PyTuple_GetItem(moment.ptr(), i)); };
      const Format own = format_of(at(2));
      if (k > 0 && own != format) throw NotPlain{};
      format = own;
      const Flat value = flat(at(0), n);
      if (!holds(format, value.type)) throw NotPlain{};
      values[k] = value.address;
      if (format != kInt8Moment) continue;
      const Flat scale = flat(at(1), (n + kBlock - 1) / kBlock);
      if (scale.type != kFloat32) throw NotPlain{};
      scales[k] = scale.address;
    }
    return format;
  }

  Format format_of(nb::handle given) const {
    for (int code = 0; code <= kInt8Moment; ++code) {
      if (PyTuple_GetItem(formats_.ptr(), code) == given.ptr()) return static_cast<Format>(code);
    }
    throw NotPlain{};
  }

  static bool holds(Format format, unsigned type) {
    if (format == kFp32Moment) return type == kFloat32;
    if (format == kInt8Moment) return type == kUint8;
    return type == kBfloat16 || type == kInt16;
  }

  static Layout layout_of(unsigned weight, unsigned rest) {
    if (weight == kFloat32 && rest == 0) return kFp32Weight;
    if (weight == kBfloat16 && rest == kInt16) return kSplitWeight;
    if (weight == kFloat16 && rest == kFloat32) return kFp16Weight;
    throw NotPlain{};
  }

  static Dtype dtype_of(unsigned type) {
    if (type == kFloat32) return kFp32;
    if (type == kBfloat16) return kBf16;
    if (type == kFloat16) return kFp16;
    throw NotPlain{};
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
    Reader reader(std::move(formats), tensor_type, api);
    const std::size_t count = nb::len(pieces);
    if (nb::len(settings) != count) throw NotPlain{};
    std::vector<Piece> made;
    made.reserve(count);
    for (std::size_t i = 0; i < count; ++i) made.push_back(reader.piece(pieces[i], settings[i]));
    return made;
  } catch (const NotPlain&) {
  } catch (const nb::python_error&) {
  } catch (const nb::cast_error&) {
  } catch (const std::invalid_argument&) {
  }
  return std::nullopt;
}

}  // namespace infinity
