// A message's header begins with two tables. The first says how many references there are, and for each its
// object, owner and fork. The second says how many tensors, and for each its element type, flags and sizes.
// The bytes of the values follow. A dense tensor is one payload: its memory as it lies, with its strides,
// where it has no gaps, as one in channels_last; else a contiguous copy. A sparse one (COO) has two: its
// indices, and its values. The table says besides how many of its dimensions are sparse, and how many entries
// it has.
//
// A payload shares the memory of its tensor, on both sides: nothing is copied here where a tensor is
// contiguous and on the CPU. Where nobody else holds the tensor its memory moves: module net may give the
// receiver the memory itself, and the receiver owns it. So both sides see what they would see of a copy. In a
// call of a worker to itself the payload is copied, so that both sides have values of their own.
//
// The sizes in the table come from another process. They are multiplied with a check for overflow, and
// compared with the payload's length, before a tensor is made of them. LibTorch trusts the indices of a
// sparse tensor, so each is compared with its dimension, in memory that the sender cannot write.
#include "cohort/rpc/internal/wire.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::rpc {
namespace {

constexpr std::size_t kMaxDims = 64;
constexpr std::uint64_t kMaxElements = std::uint64_t{1} << 46;

[[noreturn]] void reject_message(const std::string& what) {
  throw CommError("rpc.receive", what, "the same program on all workers");
}

bool is_dense_type(at::ScalarType type) {
  return at::isIntegralType(type, true) || at::isFloatingType(type) || at::isComplexType(type);
}

enum TensorFlag : std::uint8_t { kRequiresGrad = 1, kIsSparse = 2, kIsCoalesced = 4, kHasStrides = 8 };
constexpr int kAllFlags = kRequiresGrad | kIsSparse | kIsCoalesced | kHasStrides;

void check_travels(const at::Tensor& tensor) {
  const bool has_layout = tensor.layout() == at::kStrided || tensor.layout() == at::kSparse;
  if (has_layout && !tensor.is_meta() && is_dense_type(tensor.scalar_type())) return;
  throw UsageError("rpc.send", base::concat("a tensor of ", tensor.toString(), " cannot travel"),
                   "a dense tensor, or a sparse one (COO): tensor.to_dense(), tensor.dequantize()");
}

// Whether they are those of a tensor whose dimensions lie in some order, without gaps.
bool are_without_gaps(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (strides[d] < 0 || strides[d] > static_cast<std::int64_t>(kMaxElements)) return false;
    if (sizes[d] > 1) dims.emplace_back(strides[d], sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// A tensor on the CPU whose values have no gaps. resolve_*: views of complex numbers may hold a pending
// operation.
at::Tensor without_gaps(const at::Tensor& given) {
  const at::Tensor tensor = given.to(at::kCPU).resolve_conj().resolve_neg();
  // LibTorch does not look at the strides of dimensions of size 1, which may be anything.
  const bool has_none = tensor.is_contiguous() || (tensor.is_non_overlapping_and_dense() &&
                                                   are_without_gaps(tensor.sizes(), tensor.strides()));
  return has_none ? tensor : tensor.contiguous();
}

std::uint8_t flags_of(const at::Tensor& tensor, bool has_strides) {
  int flags = has_strides ? kHasStrides : 0;
  if (tensor.requires_grad() && tensor.is_leaf()) flags |= kRequiresGrad;
  if (tensor.is_sparse()) flags |= kIsSparse;
  if (tensor.is_sparse() && tensor.is_coalesced()) flags |= kIsCoalesced;
  return static_cast<std::uint8_t>(flags);
}

// Of tensor_over(): what keeps its memory.
void drop_owner(void* owner) {
  delete static_cast<std::shared_ptr<const void>*>(owner);
}

// So nobody can see what the receiver writes. What belongs to a graph may be saved for a backward. Memory
// that a program made a tensor of (from_blob, DLPack) may be another tensor's too: only tensors that this
// module made move.
bool is_only_holder(const at::Tensor& tensor) {
  return !tensor.is_sparse() && !tensor.requires_grad() && tensor.use_count() == 1 &&
         tensor.weak_use_count() <= 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().data_ptr().get_deleter() == &drop_owner;
}

// `dense` has no gaps.
void add_payload(net::Message& message, const at::Tensor& given, const at::Tensor& dense, Memory memory,
                 bool moves = false) {
  at::Tensor tensor = dense;
  if (memory == Memory::kOwn && tensor.is_alias_of(given)) tensor = tensor.clone();
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  message.payloads.push_back({std::make_shared<at::Tensor>(tensor), {data, tensor.nbytes()}, moves});
}

// Also beside a size of 0, for LibTorch multiplies them.
void check_sizes(at::IntArrayRef sizes, std::uint64_t max_elements) {
  std::uint64_t elements = 1;
  for (const std::int64_t size : sizes) {
    if (size < 0 ||
        __builtin_mul_overflow(elements, std::max<std::uint64_t>(static_cast<std::uint64_t>(size), 1),
                               &elements) ||
        elements > max_elements) {
      reject_message("a tensor has more elements than memory has bytes");
    }
  }
}

// `strides` may be empty: those of a contiguous tensor.
at::Tensor tensor_of(const net::Payload& payload, at::IntArrayRef sizes, at::ScalarType type,
                     at::IntArrayRef strides = {}) {
  check_sizes(sizes, kMaxElements);
  std::uint64_t numel = 1;
  for (const std::int64_t size : sizes) numel *= static_cast<std::uint64_t>(size);
  const auto options = at::TensorOptions(type);
  if (numel * options.dtype().itemsize() != payload.bytes.size()) {
    reject_message(
        base::concat("a tensor of ", numel, " elements came with ", payload.bytes.size(), " bytes"));
  }
  if (!strides.empty() && (numel == 0 || !are_without_gaps(sizes, strides))) {
    reject_message(base::concat("a tensor of sizes ", sizes, " came with strides ", strides));
  }
  return tensor_over(payload.owner, const_cast<std::byte*>(payload.bytes.data()), sizes, type, strides);
}

// Says which index is outside of its dimension; empty where none is.
std::string describe_wrong_index(const at::Tensor& indices, at::IntArrayRef sizes) {
  const std::int64_t num_dims = indices.size(0), num_entries = indices.size(1);
  const auto* const data = indices.const_data_ptr<std::int64_t>();
  for (std::int64_t d = 0; d < num_dims; ++d) {
    const std::int64_t size = sizes[static_cast<std::size_t>(d)];
    for (std::int64_t i = 0; i < num_entries; ++i) {
      const std::int64_t index = data[d * num_entries + i];
      if (index >= 0 && index < size) continue;
      return base::concat("a sparse tensor has index ", index, " in a dimension of size ", size);
    }
  }
  return "";
}

// Returns whether they stand in their order, each once.
bool check_indices(const at::Tensor& indices, at::IntArrayRef sizes) {
  if (const std::string wrong = describe_wrong_index(indices, sizes); !wrong.empty()) reject_message(wrong);
  const std::int64_t num_dims = indices.size(0), num_entries = indices.size(1);
  const auto* const data = indices.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 1; i < num_entries; ++i) {
    std::int64_t d = 0;
    while (d < num_dims && data[d * num_entries + i] == data[d * num_entries + i - 1]) ++d;
    if (d == num_dims || data[d * num_entries + i] < data[d * num_entries + i - 1]) return false;
  }
  return true;
}

// The tensors of a message, from its table and its payloads.
class TensorReader {
 public:
  TensorReader(Reader& table, const std::vector<net::Payload>& payloads)
      : table_(table), payloads_(payloads) {}

  at::Tensor next() {
    const auto type = table_.number<std::int8_t>();
    if (type < 0 || type >= static_cast<int>(at::ScalarType::NumOptions) ||
        !is_dense_type(static_cast<at::ScalarType>(type))) {
      reject_message(base::concat("a tensor has elements of type ", static_cast<int>(type)));
    }
    const auto flags = table_.number<std::uint8_t>();
    const bool is_sparse = (flags & kIsSparse) != 0, has_strides = (flags & kHasStrides) != 0;
    if (flags > kAllFlags || (is_sparse && has_strides)) reject_message("a tensor has an unknown flag");
    const std::size_t num_dims = table_.count();
    if (num_dims > kMaxDims) reject_message(base::concat("a tensor has ", num_dims, " dimensions"));
    std::vector<std::int64_t> sizes(num_dims);
    for (std::int64_t& size : sizes) size = static_cast<std::int64_t>(table_.any_count());
    const auto scalar_type = static_cast<at::ScalarType>(type);
    std::vector<std::int64_t> strides(has_strides ? num_dims : 0);
    for (std::int64_t& stride : strides) stride = static_cast<std::int64_t>(table_.any_count());
    at::Tensor tensor = is_sparse ? sparse(sizes, scalar_type, (flags & kIsCoalesced) != 0)
                                  : tensor_of(next_payload(), sizes, scalar_type, strides);
    if ((flags & kRequiresGrad) == 0) return tensor;
    if (at::isIntegralType(scalar_type, true)) reject_message("whole numbers require grad");
    return tensor.set_requires_grad(true);
  }
  void finish() const {
    if (next_ != payloads_.size()) {
      reject_message(base::concat(payloads_.size(), " payloads came, of which tensors take ", next_));
    }
  }

 private:
  const net::Payload& next_payload() {
    if (next_ == payloads_.size()) {
      reject_message(base::concat("more tensors are said to come than the ", next_, " payloads that came"));
    }
    return payloads_[next_++];
  }
  at::Tensor sparse(const std::vector<std::int64_t>& sizes, at::ScalarType type, bool is_coalesced) {
    check_sizes(sizes, std::numeric_limits<std::int64_t>::max());
    const std::uint64_t num_sparse = table_.any_count();
    if (num_sparse > sizes.size()) {
      reject_message(base::concat(num_sparse, " of ", sizes.size(), " dimensions are said to be sparse"));
    }
    const auto num_entries = static_cast<std::int64_t>(table_.any_count());
    const net::Payload& of_indices = next_payload();
    at::Tensor indices =
        tensor_of(of_indices, {static_cast<std::int64_t>(num_sparse), num_entries}, at::kLong);
    if (of_indices.moves) indices = indices.clone();  // the sender could change them after they are checked
    std::vector<std::int64_t> shape{num_entries};
    shape.insert(shape.end(), sizes.begin() + static_cast<std::ptrdiff_t>(num_sparse), sizes.end());
    const at::Tensor values = tensor_of(next_payload(), shape, type);
    // Entries that are only said to be in their order count as what they are.
    const bool is_in_order = check_indices(indices, sizes);
    return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse),
                                         is_coalesced && is_in_order);
  }

  Reader& table_;
  const std::vector<net::Payload>& payloads_;
  std::size_t next_ = 0;
};

}  // namespace

net::Message to_message(std::uint32_t channel, const Encoded& encoded, Memory memory) {
  Writer table;
  table.count(encoded.tensors.size());
  net::Message message;
  message.channel = channel;
  for (const at::Tensor& given : encoded.tensors) {
    check_travels(given);
    const bool moves = is_only_holder(given);
    const at::Tensor detached = given.detach(),
                     tensor = given.is_sparse() ? detached : without_gaps(detached);
    const bool has_strides = !given.is_sparse() && tensor.numel() > 0 && !tensor.is_contiguous();
    table.number(static_cast<std::int8_t>(tensor.scalar_type()));
    table.number(flags_of(given, has_strides));
    table.count(static_cast<std::uint64_t>(tensor.dim()));
    for (const std::int64_t size : tensor.sizes()) table.count(static_cast<std::uint64_t>(size));
    if (tensor.is_sparse()) {
      table.count(static_cast<std::uint64_t>(tensor.sparse_dim()));
      table.count(static_cast<std::uint64_t>(tensor._nnz()));
      // The receiver would drop the whole message: its caller would learn nothing.
      const at::Tensor indices = tensor._indices().to(at::kCPU).contiguous();
      if (const std::string wrong = describe_wrong_index(indices, tensor.sizes()); !wrong.empty()) {
        throw UsageError("rpc.send", wrong, "at::sparse_coo_tensor, which checks them");
      }
      add_payload(message, given._indices(), indices, memory);
      add_payload(message, given._values(), without_gaps(tensor._values()).contiguous(), memory);
    } else {
      const at::IntArrayRef strides = has_strides ? tensor.strides() : at::IntArrayRef();
      for (const std::int64_t stride : strides) table.count(static_cast<std::uint64_t>(stride));
      add_payload(message, given, tensor, memory, moves);
    }
  }
  message.header = table.take().bytes + encoded.bytes;
  return message;
}

void add_references(net::Message& message, const std::vector<WireReference>& references) {
  Writer table;
  table.count(references.size());
  for (const WireReference& reference : references) {
    table.number(reference.object.creator);
    table.number(reference.object.number);
    table.number(reference.owner);
    table.number(reference.fork.maker);
    table.number(reference.fork.number);
  }
  message.header.insert(0, table.take().bytes);
}

std::pair<Encoded, std::vector<WireReference>> to_encoded(net::Message& message) {
  const Encoded header{std::move(message.header), {}, {}};
  Reader table(header);
  std::vector<WireReference> references;
  for (std::size_t left = table.count(); left > 0; --left) {
    WireReference reference;
    reference.object.creator = table.number<std::int32_t>();
    reference.object.number = table.number<std::uint64_t>();
    reference.owner = table.number<std::int32_t>();
    reference.fork.maker = table.number<std::int32_t>();
    reference.fork.number = table.number<std::uint64_t>();
    references.push_back(reference);
  }
  Encoded encoded;
  TensorReader tensors(table, message.payloads);
  for (std::size_t left = table.count(); left > 0; --left) encoded.tensors.push_back(tensors.next());
  tensors.finish();
  encoded.bytes = table.rest().bytes;
  return {std::move(encoded), std::move(references)};
}

at::Tensor tensor_over(std::shared_ptr<const void> owner, void* data, at::IntArrayRef sizes,
                       at::ScalarType type, at::IntArrayRef strides) {
  return at::for_blob(data, sizes)
      .strides(strides.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(strides))
      .context(new std::shared_ptr<const void>(std::move(owner)), &drop_owner)
      .options(at::TensorOptions(type))
      .allocator(c10::GetCPUAllocator())
      .resizeable_storage()
      .make_tensor();
}

std::shared_ptr<std::byte> allocate_payload(std::size_t num_bytes) {
  try {
    const auto data = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(num_bytes));
    return {data, static_cast<std::byte*>(data->get())};
  } catch (const c10::Error&) {
    throw std::bad_alloc();
  }
}

}  // namespace cohort::rpc
