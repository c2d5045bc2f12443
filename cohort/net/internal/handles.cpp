// A payload goes by handle in two cases: it lies in a block of this process's heap, or in a block that came
// from this peer. The second block goes home: is_receivers says so, and the receiver finds the block in its
// own heap. Any other payload is copied. Always: a handle from the peer is checked before a byte of its block
// is read.
#include "cohort/net/internal/handles.h"

#include <cstdint>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/net/internal/bytes.h"

namespace cohort::net {
namespace {

bool may_go_by_handle(const Payload& payload) {
  return payload.moves && payload.bytes.size() >= kLeastBytesByHandle;
}

}  // namespace

std::string encode(const Handle& handle) {
  std::string bytes;
  bytes.reserve(kHandleBytes);
  put(bytes, handle.ticket);
  put(bytes, handle.offset);
  put(bytes, handle.slot);
  put(bytes, static_cast<std::uint32_t>(handle.is_receivers));
  return bytes;
}

Handle decode_handle(std::string_view bytes) {
  ByteReader reader(bytes);
  Handle handle;
  handle.ticket = reader.number<std::uint64_t>();
  handle.offset = reader.number<std::uint64_t>();
  handle.slot = reader.number<std::uint32_t>();
  const auto whose = reader.number<std::uint32_t>();
  if (whose > 1)
    throw CommError("net.handle", base::concat("a handle is of heap ", whose, ", expected 0 or 1"));
  handle.is_receivers = whose == 1;
  return handle;
}

std::optional<Handles::Lent> Handles::lend(const Payload& payload) const {
  if (!may_go_by_handle(payload)) return std::nullopt;
  if (std::shared_ptr<SharedHeap::Lease> lease = own_->lend(payload.bytes, peer_)) {
    const Handle handle = lease->handle();
    return Lent{handle, std::move(lease), nullptr};
  }
  // Memory of a third process's heap is not found here: the peer cannot map it, so it is copied.
  if (theirs_ == nullptr) return std::nullopt;
  auto held = theirs_->find(payload.bytes);
  if (!held) return std::nullopt;
  return Lent{held->first, nullptr, std::move(held->second)};
}

Payload Handles::redeem(const Handle& handle, std::size_t num_bytes) const {
  if (num_bytes == 0) throw CommError("net.handle", "a handle came of no bytes");
  std::shared_ptr<std::byte> bytes;
  if (handle.is_receivers) {
    bytes = own_->take_back(handle, num_bytes, *peer_);
    if (bytes == nullptr) {
      throw CommError("net.handle",
                      base::concat("a handle of ", num_bytes, " bytes is sent back, slot ", handle.slot,
                                   ", ticket ", handle.ticket, ", which the peer does not have"));
    }
  } else if (theirs_ == nullptr) {
    throw CommError("net.handle", "a handle came of a heap that is not mapped here");
  } else {
    bytes = theirs_->redeem(handle, num_bytes);
  }
  const std::span<const std::byte> span(bytes.get(), num_bytes);
  return {std::move(bytes), span, true};
}

void Handles::copy_to_heap(Message& message) const {
  for (Payload& payload : message.payloads) {
    const std::size_t size = payload.bytes.size();
    if (size < kLeastBytesByHandle) continue;
    const bool is_shared = own_->contains(payload.bytes.data()) || (theirs_ && theirs_->find(payload.bytes));
    if (payload.moves && is_shared) continue;
    std::shared_ptr<std::byte> block = own_->allocate(size, SharedHeap::Purpose::kCopy);
    // Copies may take a limited part of the heap. Beyond it the payload itself goes over the link.
    if (block == nullptr) continue;
    std::memcpy(block.get(), payload.bytes.data(), size);
    const std::span<const std::byte> bytes(block.get(), size);
    payload = {std::move(block), bytes, true};
  }
}

}  // namespace cohort::net
