#include "cohort/net/node.h"

#include "cohort/base/error.h"
#include "cohort/net/internal/loop.h"

namespace cohort::net {

Node::Node(NodeOptions options, std::shared_ptr<Handler> handler)
    : loop_(std::make_shared<node_detail::Loop>(std::move(options), std::move(handler))) {
  loop_->start();
}

Node::~Node() {
  loop_->stop();
}

std::string Node::listen(const std::string& address) {
  return loop_->listen(address);
}

std::shared_ptr<Peer> Node::connect(const std::string& address, base::Deadline deadline) {
  return loop_->connect(address, deadline);
}

std::vector<std::string> Node::close(base::Deadline deadline) {
  return loop_->close(deadline);
}

}  // namespace cohort::net
