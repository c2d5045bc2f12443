#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/base/host.h"
#include "cohort/base/key_value_store.h"
#include "cohort/base/secret.h"
#include "cohort/net/node.h"
#include "cohort/rpc/agent.h"
#include "cohort/rpc/codec.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/contexts.h"
#include "cohort/rpc/internal/wire.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"
#include "tests/support/stores/map_store.h"

namespace cohort::test {

/// The words that the workers of a job leave on its store about themselves, by id.
inline std::vector<nlohmann::json> words_of_workers(base::KeyValueStore& store, int id, int size,
                                                    const std::string& own) {
  std::vector<nlohmann::json> words;
  for (const std::string& word :
       base::all_gather_words(store, "rpc/1/join", id, size, own, patience()).of_rank) {
    words.push_back(nlohmann::json::parse(word));
  }
  return words;
}

/// A call of a function, without a deadline.
inline rpc::Encoded call_message(const char* function, std::uint64_t call, rpc::Encoded arguments) {
  rpc::Writer out = rpc::begin_call_message(rpc::MessageKind::kCall, call, base::Deadline::never());
  out.text(function);
  rpc::encode(out, std::optional<std::string>());  // channel
  rpc::encode(out, std::optional<rpc::RecordedPlace>());
  rpc::encode(out, rpc::CallerState());
  out.append(std::move(arguments));
  return out.take();
}

/// An answer to a call.
template <typename T>
rpc::Encoded result_message(std::uint64_t call, const T& value) {
  rpc::Writer out = rpc::begin_message(rpc::MessageKind::kResult, call);
  rpc::encode(out, value);
  return out.take();
}

/// A process that speaks to agents as the test says: it is a node without an agent.
class FakeWorker {
 public:
  explicit FakeWorker(const std::string& name) : name_(name), handler_(std::make_shared<Handler>()) {
    net::NodeOptions options;
    options.name = name;
    options.secret = base::Secret::of_process();
    node_ = std::make_unique<net::Node>(std::move(options), handler_);
  }
  /// Exchanges words with the other workers over the store, as an agent does. Connects to nobody.
  void join_rendezvous(int id, int size, base::KeyValueStore& store) {
    base::all_gather_words(store, "rpc/1/host", id, size, base::machine_id(), patience());
    const nlohmann::json own = {{"name", name_},
                                {"address", node_->listen("127.0.0.1:0")},
                                {"incarnation", node_->incarnation()},
                                {"functions", rpc::all_signatures()}};
    for (const nlohmann::json& word : words_of_workers(store, id, size, own.dump())) {
      addresses_.push_back(word.at("address"));
    }
  }
  void connect(const std::string& address) { peer_ = node_->connect(address, patience()); }
  void connect(int id) { connect(address(id)); }
  /// Where a worker of this one's job listens.
  const std::string& address(int id) const { return addresses_.at(static_cast<std::size_t>(id)); }
  /// Waits until somebody has connected, and takes that one as the receiver of send().
  void accept() {
    wait_until([this] { return handler_->first() != nullptr; });
    peer_ = handler_->first();
  }
  void send(const rpc::Encoded& encoded) {
    net::Message message = rpc::to_message(0, encoded);
    rpc::add_references(message, {});
    peer_->send(std::move(message));
  }
  /// Leaves once all that was sent has arrived. Returns whether it has.
  bool leave() { return node_->close(patience()).empty(); }

 private:
  class Handler : public net::Handler {
   public:
    void on_connect(const std::shared_ptr<net::Peer>& peer) override {
      const std::lock_guard lock(mutex_);
      if (first_ == nullptr) first_ = peer;
    }
    void on_message(const std::shared_ptr<net::Peer>&, net::Message) override {}
    std::shared_ptr<net::Peer> first() {
      const std::lock_guard lock(mutex_);
      return first_;
    }

   private:
    std::mutex mutex_;
    std::shared_ptr<net::Peer> first_;
  };

  const std::string name_;
  const std::shared_ptr<Handler> handler_;
  std::vector<std::string> addresses_;  // of all workers, by id
  std::unique_ptr<net::Node> node_;
  std::shared_ptr<net::Peer> peer_;
};

/// A job whose workers w0, w1 ... are fakes, but for one, which joins meanwhile.
class JobOfFakes {
 public:
  /// The rendezvous is over; the fakes of higher ids have yet to connect to the agent.
  JobOfFakes(int size, int id_of_agent, const rpc::AgentOptions& options = {}) {
    agent_ = std::async(std::launch::async, [this, size, id_of_agent, options] {
      return std::make_unique<rpc::Agent>("w" + std::to_string(id_of_agent), id_of_agent, size, store_,
                                          options);
    });
    for (int id = 0; id < size; ++id) {
      fakes_.push_back(std::make_unique<FakeWorker>("w" + std::to_string(id)));
    }
    std::vector<std::thread> threads;
    for (int id = 0; id < size; ++id) {
      if (id != id_of_agent)
        threads.emplace_back([this, id, size] { fake(id).join_rendezvous(id, size, store_); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  FakeWorker& fake(int id) { return *fakes_.at(static_cast<std::size_t>(id)); }
  /// The agent, once it has joined: call it once.
  std::unique_ptr<rpc::Agent> agent() { return agent_.get(); }

 private:
  MapStore store_;
  std::vector<std::unique_ptr<FakeWorker>> fakes_;  // that of the agent's id is not used
  std::future<std::unique_ptr<rpc::Agent>> agent_;
};

}  // namespace cohort::test
