#include "cohort/net/node.h"

#include "cohort/base/error.h"
#include "cohort/net/internal/loop/loop.h"

namespace cohort::net {
namespace {

// A peer that has nothing to say sends heartbeats. With a shorter silence one that is late ends the peer.
NodeOptions check_times(NodeOptions options) {
  if (options.heartbeat.count() > 0 && options.silence >= 2 * options.heartbeat) return options;
  throw UsageError(
      "net.node",
      base::concat("got a silence of ", options.silence.count(), " ms and a heartbeat of ",
                   options.heartbeat.count(), " ms, expected a silence of two heartbeats of 1 ms or more"),
      "a longer silence");
}

}  // namespace

Node::Node(NodeOptions options, std::shared_ptr<Handler> handler)
    : loop_(std::make_shared<node_detail::Loop>(check_times(std::move(options)), std::move(handler))) {
  loop_->start();
}

Node::~Node() {
  loop_->stop();
}

std::string Node::listen(const std::string& address, const std::string& host) {
  return loop_->listen(address, host);
}

const std::string& Node::incarnation() const {
  return loop_->incarnation();
}

std::shared_ptr<Peer> Node::connect(const std::string& address, base::Deadline deadline,
                                    WhenRejected when_rejected) {
  return loop_->connect(address, deadline, when_rejected == WhenRejected::kGiveUp);
}

std::shared_ptr<std::byte> Node::allocate_shared(std::size_t num_bytes) {
  return loop_->allocate_shared(num_bytes);
}

SharedMetrics Node::shared_metrics() const {
  return loop_->shared_metrics();
}

void Node::replace_thread() {
  loop_->replace_thread();
}

void Node::will_wait() {
  loop_->will_wait();
}

bool Node::is_own_thread() const {
  return loop_->is_own_thread();
}

void Node::stop() {
  loop_->stop();
}

std::vector<std::string> Node::close(base::Deadline deadline) {
  return loop_->close(deadline);
}

}  // namespace cohort::net
