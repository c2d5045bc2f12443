#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "cohort/base/host.h"
#include "cohort/base/key_value_store.h"
#include "cohort/base/secret.h"
#include "cohort/net/node.h"
#include "cohort/rpc/function.h"
#include "cohort/rpc/internal/agent/agent_members.h"
#include "cohort/rpc/internal/wire.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"

namespace cohort::test {

/// A worker of a dynamic group that joins step by step, as the test says: it is a node without an agent.
class FakeMember {
 public:
  FakeMember(const std::string& name, base::KeyValueStore& store,
             std::map<std::string, std::string> functions = rpc::all_signatures())
      : name_(name),
        store_(store),
        functions_(std::move(functions)),
        id_(rpc::claim_worker_id(store)),
        handler_(std::make_shared<Handler>()) {
    net::NodeOptions options;
    options.name = name;
    options.secret = base::Secret::of_process();
    node_ = std::make_unique<net::Node>(std::move(options), handler_);
  }
  /// Leaves its entry on the store, and listens; or says that it listens at `address`.
  void publish(const std::string& address = "") {
    const nlohmann::json entry = {
        {"name", name_},
        {"host", base::machine_id()},
        {"local", address.empty() ? node_->listen("unix:@cohort-" + base::random_word()) : address},
        {"address", ""},
        {"ticket", "ticket"},
        {"incarnation", node_->incarnation()},
        {"functions", functions_}};
    store_.set("rpc/dynamic/" + std::to_string(id_) + "/entry", entry.dump());
    store_.add("rpc/dynamic/" + std::to_string(id_) + "/claims", 1);
  }
  void connect_to(int id) { peers_[id] = node_->connect(entry_of(id).at("local"), patience()); }
  rpc::MemberMessage message_of(rpc::MemberMessageType type) const {
    rpc::MemberMessage message;
    message.type = type;
    return message;
  }
  rpc::MemberMessage join_message(int id) {
    rpc::MemberMessage message;
    message.id = id_;
    message.ticket = entry_of(id).at("ticket");
    message.functions = functions_;
    return message;
  }
  void send(int id, const rpc::MemberMessage& message) { send_to(*peers_.at(id), message); }
  /// To who sent the last message that wait_for_message() returned.
  void answer(const rpc::MemberMessage& message) { send_to(*sender_, message); }
  /// The next message about joins that came.
  rpc::MemberMessage wait_for_message() {
    wait_until([this] { return handler_->has_message(); });
    auto [sender, message] = handler_->take();
    sender_ = std::move(sender);
    return message;
  }
  /// Joins worker 0, and is ready.
  void join() {
    publish();
    connect_to(0);
    send(0, join_message(0));
    wait_for_message();
    send(0, message_of(rpc::MemberMessageType::kReady));
    wait_for_message();
  }

 private:
  using Peer = std::shared_ptr<net::Peer>;
  using Received = std::pair<Peer, rpc::MemberMessage>;

  class Handler : public net::Handler {
   public:
    void on_message(const Peer& sender, net::Message message) override {
      if (message.channel != rpc::kMemberChannel) return;
      auto [encoded, wires] = rpc::to_encoded(message);
      rpc::Reader in(encoded);
      const std::lock_guard lock(mutex_);
      messages_.emplace_back(sender, rpc::decode<rpc::MemberMessage>(in));
    }
    bool has_message() {
      const std::lock_guard lock(mutex_);
      return !messages_.empty();
    }
    Received take() {
      const std::lock_guard lock(mutex_);
      Received received;
      if (messages_.empty()) return received;
      received = std::move(messages_.front());
      messages_.pop_front();
      return received;
    }

   private:
    std::mutex mutex_;
    std::deque<Received> messages_;
  };

  static void send_to(net::Peer& peer, const rpc::MemberMessage& message) {
    rpc::Writer out;
    rpc::encode(out, message);
    net::Message sent = rpc::to_message(rpc::kMemberChannel, out.take());
    rpc::add_references(sent, {});
    peer.send(std::move(sent));
  }
  nlohmann::json entry_of(int id) {
    return nlohmann::json::parse(store_.get("rpc/dynamic/" + std::to_string(id) + "/entry"));
  }

  const std::string name_;
  base::KeyValueStore& store_;
  const std::map<std::string, std::string> functions_;
  const int id_;
  const std::shared_ptr<Handler> handler_;
  std::map<int, Peer> peers_;
  Peer sender_;
  std::unique_ptr<net::Node> node_;
};

}  // namespace cohort::test
