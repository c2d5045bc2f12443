#pragma once

#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <utility>

#include "cohort/net/node.h"
#include "tests/support/net/certificates.h"

namespace bench_net {

/// Two nodes of this process with a TCP link. What comes to the second one is counted, and sent back if it is
/// small.
class Link {
 public:
  explicit Link(bool has_tls) {
    cohort::net::NodeOptions of_a, of_b;
    of_a.name = "a";
    of_b.name = "b";
    if (has_tls) {
      authority_.emplace();
      of_a.tls = authority_->make_node("a");
      of_b.tls = authority_->make_node("b");
    }
    a_ = std::make_unique<cohort::net::Node>(of_a, here_);
    b_ = std::make_unique<cohort::net::Node>(of_b, there_);
    peer_ = a_->connect(b_->listen("127.0.0.1:0"), cohort::base::Deadline(std::chrono::seconds(10)));
  }
  /// A message of 100 bytes there and back.
  void exchange_small() {
    peer_->send({.channel = 1,
                 .header = std::string(100, 'x'),
                 .payloads = {},
                 .credit = nullptr,
                 .on_begin = nullptr});
    wait(*here_);
  }
  /// A message with a payload, until it is in the hands of the other node's handler.
  void send_large(const std::shared_ptr<std::byte>& memory, std::size_t size) {
    peer_->send({.channel = 1,
                 .header = "",
                 .payloads = {{memory, {memory.get(), size}}},
                 .credit = nullptr,
                 .on_begin = nullptr});
    wait(*there_);
  }

 private:
  struct Counter : cohort::net::Handler {
    void on_message(const std::shared_ptr<cohort::net::Peer>& peer, cohort::net::Message message) override {
      message.credit.reset();
      if (echoes && !message.header.empty()) {
        peer->send(std::move(message));
        return;
      }
      came.release();
    }
    bool echoes = false;
    std::counting_semaphore<> came{0};
  };
  static void wait(Counter& counter) {
    if (!counter.came.try_acquire_for(std::chrono::seconds(10))) throw std::runtime_error("no message came");
  }
  static std::shared_ptr<Counter> make_echo() {
    auto counter = std::make_shared<Counter>();
    counter->echoes = true;
    return counter;
  }

  std::optional<cohort::test::Authority> authority_;
  const std::shared_ptr<Counter> here_ = std::make_shared<Counter>(), there_ = make_echo();
  std::unique_ptr<cohort::net::Node> a_, b_;
  std::shared_ptr<cohort::net::Peer> peer_;
};

}  // namespace bench_net
