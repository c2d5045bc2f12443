#pragma once

#include <deque>

#include "cohort/comm/group.h"
#include "cohort/pipeline/internal/channel.h"

/// Hand-overs between ranks. Internal to Pipeline.
namespace cohort::pipeline {

/// What is left until `deadline`, for a collective that begins now.
comm::CallOptions until(const base::Deadline& deadline);

/// One end of the way between two ranks of a group: this rank sends or it receives. A message is a header
/// (which micro-batch, how many tensors, their types and shapes) and the tensors, one after the other.
/// Sending does not wait for the receiver until `capacity` messages are under way.
class GroupChannel final : public Channel {
 public:
  /// `device`: where what is received is put. `tag`: the same at both ends, and no other channel's.
  GroupChannel(comm::Group group, int peer, int tag, int capacity, c10::Device device)
      : group_(std::move(group)), peer_(peer), tag_(tag), capacity_(capacity), device_(device) {}

  void send(Message message, const base::Deadline& deadline) override;
  Message receive(const base::Deadline& deadline) override;
  /// What waits for a peer continues until the deadline of its call: a collective cannot be taken back.
  void close() override {}
  void flush() override;

 private:
  struct InFlight {
    Tensors tensors;
    std::vector<comm::Pending> pending;
  };
  void wait_for_oldest();

  comm::Group group_;
  int peer_, tag_, capacity_;
  c10::Device device_;
  std::deque<InFlight> in_flight_;
};

}  // namespace cohort::pipeline
