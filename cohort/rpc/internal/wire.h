#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cohort/net/message.h"
#include "cohort/rpc/encoded.h"
#include "cohort/rpc/internal/protocol/reference_protocol.h"

/// Encoded values as messages of module net: tensors become payloads, which are not copied where they lie in
/// one piece on the CPU. A sparse tensor becomes two: indices and values.
namespace cohort::rpc {

/// Whether payloads are the tensors' own memory, where it lies in one piece on the CPU, or copies.
enum class Memory : std::uint8_t { kShared, kOwn };

/// The tensors and bytes of a value: its references are the caller's to add, who knows their forks. The
/// payload of a dense tensor that `encoded` alone holds moves (net::Payload), so the caller drops `encoded`
/// and reads nothing of it. Throws: UsageError for a tensor that cannot travel: another layout than dense and
/// sparse (COO), quantized, on a meta device, sparse with an index outside of its sizes.
net::Message to_message(std::uint32_t channel, const Encoded& encoded, Memory memory = Memory::kShared);
void add_references(net::Message& message, const std::vector<WireReference>& references);
/// Bytes of the header that add_references() adds for so many, at most.
inline std::size_t most_bytes_of_references(std::size_t count) {
  return 10 + count * (3 * sizeof(std::int32_t) + 2 * sizeof(std::uint64_t));
}

/// A value without its references, and those. The tensors share the memory that the message was read into.
/// Throws: CommError for what to_message() and add_references() do not write.
std::pair<Encoded, std::vector<WireReference>> to_encoded(net::Message& message);

/// A tensor of memory that lives as long as the tensor, and views of it. It can be resized, and takes
/// LibTorch's memory then.
at::Tensor tensor_over(std::shared_ptr<const void> owner, void* data, at::IntArrayRef sizes,
                       at::ScalarType type, at::IntArrayRef strides = {});

/// Memory for a tensor that comes, of LibTorch's allocator: memory::tune_allocator() has it keep its pages.
std::shared_ptr<std::byte> allocate_payload(std::size_t num_bytes);

}  // namespace cohort::rpc
