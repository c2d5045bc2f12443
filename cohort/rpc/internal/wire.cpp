// A message's header begins with two tables. The first says how many references there are, and for each its
// object, owner and fork. The second says how many tensors, and for each its element type, whether it requires
// grad and its sizes. The bytes of the values follow. Each tensor is one payload, contiguous.
//
// A payload shares the memory of its tensor, on both sides: nothing is copied where a tensor is contiguous and on
// the CPU. In a call of a worker to itself it is copied, so that both sides have values of their own. The sizes
// in the table come from another process. They are multiplied with a check for overflow, and compared with the
// payload's length, before from_blob() makes a tensor of them.
#include "cohort/rpc/internal/wire.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
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

at::Tensor to_travel(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_meta() || !is_dense_type(tensor.scalar_type())) {
    throw UsageError("rpc.send", base::concat("a tensor of ", tensor.toString(), " cannot travel"),
                     "a dense tensor: tensor.to_dense(), tensor.dequantize()");
  }
  // resolve_*: views of complex numbers may hold a pending operation.
  return tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
}

}  // namespace

net::Message to_message(std::uint32_t channel, const Encoded& encoded, Memory memory) {
  Writer table;
  table.count(encoded.tensors.size());
  net::Message message;
  message.channel = channel;
  for (const at::Tensor& given : encoded.tensors) {
    at::Tensor tensor = to_travel(given);
    if (memory == Memory::kOwn && tensor.is_alias_of(given)) tensor = tensor.clone();
    table.number(static_cast<std::int8_t>(tensor.scalar_type()));
    table.number(given.requires_grad() && given.is_leaf());
    table.count(static_cast<std::uint64_t>(tensor.dim()));
    for (const std::int64_t size : tensor.sizes()) table.count(static_cast<std::uint64_t>(size));
    const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
    message.payloads.push_back({std::make_shared<at::Tensor>(tensor), {data, tensor.nbytes()}});
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
  const std::size_t num_tensors = table.count();
  if (num_tensors != message.payloads.size()) {
    reject_message(base::concat(num_tensors, " tensors are said to come, but ", message.payloads.size(),
                                " payloads came"));
  }
  Encoded encoded;
  for (const net::Payload& payload : message.payloads) {
    const auto type = table.number<std::int8_t>();
    if (type < 0 || type >= static_cast<int>(at::ScalarType::NumOptions) ||
        !is_dense_type(static_cast<at::ScalarType>(type))) {
      reject_message(base::concat("a tensor has elements of type ", static_cast<int>(type)));
    }
    const bool requires_grad = table.number<bool>();
    const std::size_t num_dims = table.count();
    if (num_dims > kMaxDims) reject_message(base::concat("a tensor has ", num_dims, " dimensions"));
    std::vector<std::int64_t> sizes(num_dims);
    std::uint64_t numel = 1, strides = 1;
    for (std::int64_t& size : sizes) {
      size = static_cast<std::int64_t>(table.any_count());
      numel *= static_cast<std::uint64_t>(size);
      // Also beside a size of 0, for LibTorch multiplies them.
      if (size < 0 ||
          __builtin_mul_overflow(strides, std::max<std::uint64_t>(static_cast<std::uint64_t>(size), 1),
                                 &strides) ||
          strides > kMaxElements) {
        reject_message("a tensor has more elements than memory has bytes");
      }
    }
    const auto options = at::TensorOptions(static_cast<at::ScalarType>(type));
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(numel, static_cast<std::uint64_t>(options.dtype().itemsize()), &bytes) ||
        bytes != payload.bytes.size()) {
      reject_message(
          base::concat("a tensor of ", numel, " elements came with ", payload.bytes.size(), " bytes"));
    }
    void* const data = const_cast<std::byte*>(payload.bytes.data());
    at::Tensor tensor = at::from_blob(data, sizes, [owner = payload.owner](void*) {}, options);
    if (requires_grad && at::isIntegralType(tensor.scalar_type(), true))
      reject_message("whole numbers require grad");
    if (requires_grad) tensor.set_requires_grad(true);
    encoded.tensors.push_back(std::move(tensor));
  }
  encoded.bytes = table.rest().bytes;
  return {std::move(encoded), std::move(references)};
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
