#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "cohort/net/internal/mapped_heap.h"
#include "cohort/net/internal/shared_heap.h"
#include "cohort/net/message.h"

namespace cohort::net {

/// What a handle takes among the bytes of a message.
inline constexpr std::size_t kHandleBytes = 24;
std::string encode(const Handle& handle);
/// Throws: CommError for bytes that are no handle.
Handle decode_handle(std::string_view bytes);

/// The payloads that go by handle between this process and another one. Threads: any.
class Handles {
 public:
  /// `own` and `theirs`: the heaps; `theirs` is null where it is not mapped here.
  Handles(std::shared_ptr<SharedHeap> own, std::shared_ptr<MappedHeap> theirs, std::shared_ptr<Holder> peer)
      : own_(std::move(own)), theirs_(std::move(theirs)), peer_(std::move(peer)) {}

  bool maps_theirs() const { return theirs_ != nullptr; }

  /// A handle that is on its way, and what keeps it good until the message is gone.
  struct Lent {
    Handle handle;
    std::shared_ptr<SharedHeap::Lease> lease;  ///< of the own heap
    std::shared_ptr<const void> hold;          ///< of the other side's
  };
  /// Empty for a payload that has to be copied: a short one, one that does not move, or memory of neither
  /// heap.
  std::optional<Lent> lend(const Payload& payload) const;
  /// Throws: CommError for a handle that the peer may not send.
  Payload redeem(const Handle& handle, std::size_t num_bytes) const;

  /// Copies long payloads that lend() would not take into blocks of the own heap, as far as its cached bytes
  /// go.
  void copy_to_heap(Message& message) const;

  /// The session has ended: what the peer holds is free once its process is gone.
  void lose_peer() const { peer_->lose(); }

 private:
  const std::shared_ptr<SharedHeap> own_;
  const std::shared_ptr<MappedHeap> theirs_;
  const std::shared_ptr<Holder> peer_;
};

}  // namespace cohort::net
