#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/secret.h"
#include "cohort/elastic/internal/net_slice_exchange.h"
#include "tests/support/comes_true.h"
#include "tests/support/patience.h"

namespace cohort::test {

inline membership::RankOrder order_of(std::uint64_t number, int process, int num_processes,
                                      bool is_planned = false) {
  membership::RankOrder order;
  order.revision = number;
  order.generation.number = number;
  order.generation.is_planned = is_planned;
  order.generation.virtual_ranks = num_processes;
  order.generation.cause = "a test";
  for (int i = 0; i < num_processes; ++i) {
    order.generation.members.push_back(
        {static_cast<membership::MemberId>(i + 1), base::concat("agent ", i), "127.0.0.1:1", 1});
  }
  order.process = process;
  return order;
}

// Processes of a generation in one process, without agents.
class Ring {
 public:
  Ring(int size, const std::string& listen,
       std::chrono::milliseconds timeout = std::chrono::milliseconds(30'000)) {
    std::vector<std::string> addresses, incarnations;
    for (int i = 0; i < size; ++i) {
      inboxes.push_back(std::make_shared<elastic::ProcessInbox>([](membership::MemberId) {}));
      net::NodeOptions options;
      options.name = base::concat("rank/", i);
      nodes.push_back(std::make_shared<net::Node>(options, inboxes.back()));
      const bool is_local = listen == "local";
      addresses.push_back(nodes.back()->listen(is_local ? "unix:@cohort-" + base::random_word() : listen));
      incarnations.push_back(nodes.back()->incarnation());
    }
    for (int i = 0; i < size; ++i) {
      for (int k = i + 1; k < size; ++k) {
        inboxes[at(i)]->on_connect(nodes[at(i)]->connect(addresses[at(k)], patience()));
      }
    }
    for (int i = 0; i < size; ++i) {
      inboxes[at(i)]->on_order(order_of(1, i, size));
      inboxes[at(i)]->enter([](const membership::Generation&) {});
      inboxes[at(i)]->set_processes(incarnations);
      for (int k = 0; k < size; ++k) {
        if (k != i) test::wait_until([&] { return inboxes[at(i)]->peer_of(k) != nullptr; });
      }
      exchanges.push_back(std::make_shared<elastic::NetSliceExchange>(
          nodes[at(i)], inboxes[at(i)], elastic::ExchangePlace{1, i, size, timeout}));
    }
  }
  ~Ring() {
    exchanges.clear();
    for (const auto& node : nodes) node->stop();
  }

  static std::size_t at(int i) { return static_cast<std::size_t>(i); }

  // Runs the body on each process, as a thread.
  void run(const std::function<void(int process, elastic::NetSliceExchange& exchange)>& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < static_cast<int>(exchanges.size()); ++i) {
      threads.emplace_back([&, i] { EXPECT_NO_THROW(body(i, *exchanges[at(i)])); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::shared_ptr<elastic::ProcessInbox>> inboxes;
  std::vector<std::shared_ptr<net::Node>> nodes;
  std::vector<std::shared_ptr<elastic::NetSliceExchange>> exchanges;
};

}  // namespace cohort::test
