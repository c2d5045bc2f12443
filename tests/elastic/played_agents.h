#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/elastic/internal/net_session.h"
#include "cohort/membership/net_store.h"
#include "cohort/membership/rank_link.h"
#include "tests/support/comes_true.h"

namespace cohort::test {

/// Sessions of this process, whose agents the test plays. Each has a member of its own.
class PlayedAgents {
 public:
  explicit PlayedAgents(int virtual_ranks = 8) : virtual_ranks_(virtual_ranks) {}
  // A thread that waits for its agent hears that it is gone.
  ~PlayedAgents() {
    for (const auto& rank : ranks_) rank->link.shutdown();
    for (const auto& rank : ranks_) {
      if (rank->thread.joinable()) rank->thread.join();
    }
  }

  struct Rank {
    explicit Rank(membership::RankLink link) : link(std::move(link)) {}
    membership::RankLink link;
    std::shared_ptr<elastic::Session> session;
    membership::RankStatus status;
    membership::MemberId id = 0;
    bool is_member = false;
    std::thread thread;
    bool has_returned = false;  // read after the thread has been joined
  };

  Rank& add(const elastic::SessionOptions& options = {}) {
    auto [here, there] = membership::RankLink::make_pair();
    ranks_.push_back(std::make_unique<Rank>(std::move(here)));
    Rank& rank = *ranks_.back();
    rank.id = ranks_.size();
    rank.session = std::make_shared<elastic::NetSession>(std::move(there), virtual_ranks_, options);
    return rank;
  }
  /// Runs what the process does. It must not throw.
  void start(Rank& rank, const std::function<void(elastic::Session& session)>& body) {
    rank.thread = std::thread([&rank, body] {
      try {
        body(*rank.session);
        rank.has_returned = true;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "process " << rank.id << ": " << error.what();
      }
    });
  }
  void join(Rank& rank) {
    rank.thread.join();
    EXPECT_TRUE(rank.has_returned);
  }

  void decide(const std::vector<Rank*>& members, bool is_planned = false, const std::string& store = "") {
    ++generation_.number;
    generation_.is_planned = is_planned;
    generation_.virtual_ranks = virtual_ranks_;
    generation_.store = store.empty() ? store_.address() : store;
    generation_.cause = "a test";
    generation_.members.clear();
    for (const Rank* const rank : members) {
      generation_.members.push_back({rank->id, base::concat("agent ", rank->id), "127.0.0.1:1", 1});
    }
    std::ranges::sort(generation_.members, {}, &membership::MemberInfo::id);
    for (const auto& rank : ranks_) rank->is_member = std::ranges::find(members, rank.get()) != members.end();
    send_orders({});
  }
  void end_run(bool has_succeeded = true, int stop_signal = 0) {
    membership::RankOrder order;
    order.has_ended = true;
    order.stop_signal = stop_signal;
    order.has_succeeded = has_succeeded;
    send_orders(order);
  }

  /// Returns when the condition holds of what the ranks say.
  void wait_until(const std::function<bool()>& condition) {
    test::wait_until([&] {
      for (const auto& rank : ranks_) read(*rank);
      return condition();
    });
  }
  void wait_until_ready() {
    wait_until(
        [&] { return std::ranges::all_of(ranks_, [](const auto& rank) { return rank->status.is_ready; }); });
  }
  const membership::Generation& generation() const { return generation_; }
  const membership::NetStoreServer& store() const { return store_; }

 private:
  static void read(Rank& rank) {
    try {
      while (const auto text = rank.link.receive(base::Deadline(std::chrono::milliseconds(0)))) {
        rank.status = membership::parse_rank_status(*text);
      }
    } catch (const CommError&) {  // its session is destroyed
    }
  }
  void send_orders(membership::RankOrder order) {
    order.number = order.revision = ++revision_;
    order.generation = generation_;
    for (const auto& rank : ranks_) {
      order.process.reset();
      if (rank->is_member) order.process = generation_.first_process(rank->id);
      try {
        rank->link.send(to_text(order), base::Deadline(std::chrono::seconds(1)));
      } catch (const CommError&) {  // likewise
      }
    }
  }

  const int virtual_ranks_;
  membership::NetStoreServer store_{{}};
  membership::Generation generation_;
  std::uint64_t revision_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace cohort::test
