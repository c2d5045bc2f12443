#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <iostream>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/elastic/session.h"
#include "cohort/optim/sgd.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_memory.h"
#include "tests/elastic/ring.h"
#include "tests/support/comes_true.h"
#include "tests/support/slowdown.h"
#include "tests/support/throws.h"

namespace cohort::elastic {
namespace {

using parallel::SliceExchange;
using std::chrono::milliseconds;
using test::order_of;
using test::Ring;

at::Tensor bytes_from(std::uint64_t seed, std::int64_t numel, SliceExchange& exchange) {
  at::Tensor bytes = exchange.empty(numel, at::TensorOptions().dtype(at::kByte));
  std::mt19937_64 random(seed);
  auto* const data = bytes.mutable_data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < numel; ++i) data[i] = static_cast<std::uint8_t>(random());
  return bytes;
}

// What all processes do, by the seed alone: operations of any sizes, waited for in any order.
void run_program(std::uint64_t seed, int process, NetSliceExchange& exchange) {
  std::mt19937_64 program(seed), order(seed * 31 + static_cast<std::uint64_t>(process));
  const int size = exchange.size();
  std::vector<std::pair<SliceExchange::Transfer, std::function<void()>>> transfers;
  const auto any_size = [&] {
    const std::uint64_t kind = program() % 4;
    return static_cast<std::int64_t>(kind == 0   ? 0
                                     : kind == 1 ? 1 + program() % 100
                                                 : 60'000 + program() % 200'000);
  };
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t kind = program() % 3, base_seed = program();
    if (kind == 0) {
      const std::int64_t bytes = any_size();
      const at::Tensor own = bytes_from(base_seed + Ring::at(process), bytes, exchange);
      const at::Tensor all = exchange.empty(bytes * size, own.options());
      transfers.emplace_back(exchange.all_gather(all, own), [=, &exchange] {
        for (int k = 0; k < size; ++k) {
          EXPECT_TRUE(at::equal(all.narrow(0, k * bytes, bytes),
                                bytes_from(base_seed + Ring::at(k), bytes, exchange)));
        }
      });
    } else if (kind == 1) {
      const at::Tensor bytes = bytes_from(base_seed + Ring::at(process), any_size(), exchange);
      transfers.emplace_back(exchange.broadcast(bytes), [=, &exchange] {
        EXPECT_TRUE(at::equal(bytes, bytes_from(base_seed, bytes.numel(), exchange)));
      });
    } else {
      // Process a sends sizes[a][b] bytes to b.
      std::vector<std::vector<std::int64_t>> sizes(Ring::at(size), std::vector<std::int64_t>(Ring::at(size)));
      for (auto& row : sizes) std::ranges::generate(row, any_size);
      std::vector<std::int64_t> in = sizes[Ring::at(process)], out;
      for (const auto& row : sizes) out.push_back(row[Ring::at(process)]);
      std::int64_t in_sum = 0, out_sum = 0;
      for (const std::int64_t bytes : in) in_sum += bytes;
      for (const std::int64_t bytes : out) out_sum += bytes;
      at::Tensor input = exchange.empty(in_sum, at::TensorOptions().dtype(at::kByte));
      const auto piece_of = [=, &exchange](int from, int to) {
        return bytes_from(base_seed + Ring::at(from * size + to), sizes[Ring::at(from)][Ring::at(to)],
                          exchange);
      };
      for (std::int64_t to = 0, begin = 0; to < size; begin += in[Ring::at(static_cast<int>(to))], ++to) {
        input.narrow(0, begin, in[Ring::at(static_cast<int>(to))])
            .copy_(piece_of(process, static_cast<int>(to)));
      }
      const at::Tensor output = exchange.empty(out_sum, input.options());
      transfers.emplace_back(exchange.all_to_all(output, input, out, in), [=] {
        for (std::int64_t from = 0, begin = 0; from < size;
             begin += out[Ring::at(static_cast<int>(from))], ++from) {
          const at::Tensor piece = piece_of(static_cast<int>(from), process);
          EXPECT_TRUE(at::equal(output.narrow(0, begin, piece.numel()), piece));
        }
      });
    }
  }
  std::shuffle(transfers.begin(), transfers.end(), order);
  for (const auto& [transfer, check] : transfers) {
    transfer();
    check();
  }
}

TEST(NetSliceExchangeTest, AllProcessesGetWhatWasSent) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    const int size = 1 + static_cast<int>(seed % 4);
    Ring ring(size, seed % 3 == 0 ? "127.0.0.1:0" : "local");
    ring.run([&](int process, NetSliceExchange& exchange) { run_program(seed, process, exchange); });
  }
}

// A tensor may be used again when its transfer has ended: its readers have read it.
TEST(NetSliceExchangeTest, MemoryIsUsedAgain) {
  for (const char* const listen : {"local", "127.0.0.1:0"}) {
    Ring ring(3, listen);
    ring.run([](int process, NetSliceExchange& exchange) {
      constexpr std::int64_t kNumel = 300'000;
      const at::Tensor all = exchange.empty(3 * kNumel, at::TensorOptions().dtype(at::kByte));
      const at::Tensor own = all.narrow(0, process * kNumel, kNumel);
      for (int round = 0; round < 20; ++round) {
        own.fill_(round * 3 + process);
        exchange.all_gather(all, own)();
        for (int k = 0; k < 3; ++k) {
          ASSERT_TRUE(
              at::equal(all.narrow(0, k * kNumel, kNumel), at::full({kNumel}, round * 3 + k, own.options())));
        }
      }
    });
  }
}

// As those of an evaluation: where processes change meanwhile no step is dropped.
TEST(NetSliceExchangeTest, WhatIsExchangedBetweenTwoStepsIsOfNoStep) {
  Ring ring(2, "local");
  ring.run([](int, NetSliceExchange& exchange) {
    const at::Tensor own = bytes_from(1, 8, exchange);
    const auto gather = [&] { exchange.all_gather(exchange.empty(16, own.options()), own)(); };
    gather();
    EXPECT_FALSE(exchange.step_began());
    exchange.begin_step();
    const auto began = exchange.step_began();
    ASSERT_TRUE(began);
    gather();
    exchange.begin_step();  // of those that work with it, each may say so
    EXPECT_EQ(exchange.step_began(), began);
    exchange.end_step(std::chrono::nanoseconds(0));
    gather();
    EXPECT_FALSE(exchange.step_began());
  });
}

TEST(NetSliceExchangeTest, LongPiecesGoByHandle) {
  Ring ring(2, "local");
  ring.run([](int, NetSliceExchange& exchange) {
    const at::Tensor own = bytes_from(1, 1 << 20, exchange);
    exchange.all_gather(exchange.empty(2 << 20, own.options()), own)();
  });
  EXPECT_EQ(ring.inboxes[0]->peer_of(1)->metrics().bytes_by_handle, std::uint64_t{1} << 20);
}

TEST(NetSliceExchangeTest, EachProcessLearnsHowLongAllHaveWorkedInTheStepBefore) {
  Ring ring(3, "local");
  ring.run([](int process, NetSliceExchange& exchange) {
    const auto end_step = [&] {
      // Longer than all waits of the test.
      return exchange.end_step(std::chrono::seconds(1'000 * (process + 1)));
    };
    const auto transfer = [&] {
      const at::Tensor own = bytes_from(1, 100, exchange);
      exchange.all_gather(exchange.empty(300, own.options()), own)();
    };
    transfer();
    EXPECT_EQ(end_step(), (std::vector<double>{0, 0, 0})) << "there was no step before";
    for (int step = 0; step < 20; ++step) {
      transfer();
      transfer();
      const std::vector<double> seconds = end_step();
      ASSERT_EQ(seconds.size(), 3U);
      for (int i = 0; i < 3; ++i) {
        // Less its waits.
        EXPECT_LE(seconds[Ring::at(i)], 1'000 * (i + 1));
        EXPECT_GT(seconds[Ring::at(i)], 1'000 * (i + 1) - 100);
      }
    }
    const std::vector<double> alone = end_step();
    EXPECT_EQ(std::ranges::count(alone, 0.0), 2) << "a step without transfers says nothing of others";
  });
}

TEST(NetSliceExchangeTest, WaitsForOthersAreNoWork) {
  Ring ring(2, "local");
  ring.run([&](int process, NetSliceExchange& exchange) {
    const auto begin = std::chrono::steady_clock::now();
    const auto step = [&] {
      const at::Tensor own = bytes_from(1, 100, exchange);
      const auto transfer = exchange.all_gather(exchange.empty(200, own.options()), own);
      transfer();
      return exchange.end_step(std::chrono::steady_clock::now() - begin);
    };
    if (process == 1) std::this_thread::sleep_for(milliseconds(200));  // it works
    step();
    const std::vector<double> seconds = step();
    EXPECT_GT(seconds[1], 0.19);
    EXPECT_LT(seconds[0], seconds[1] - 0.1) << "it has waited meanwhile";
  });
}

// What `cohort plan --memory` says of sums and covers, in the memory that processes share.
TEST(NetSliceExchangeTest, SumsOfVirtualRanksTakeTheMemoryThatIsPlanned) {
  for (const auto& [virtual_ranks, size] : {std::pair<std::int64_t, int>{3, 3}, {8, 3}, {5, 2}}) {
    Ring ring(size, "local");
    const parallel::VirtualRankOptions options{.num_virtual_ranks = virtual_ranks};
    std::vector<parallel::VirtualRankMemory> planned(Ring::at(size));
    std::vector<std::shared_ptr<parallel::VirtualRankSync>> syncs(Ring::at(size));
    ring.run([&](int process, NetSliceExchange& exchange) {
      const auto net = torch::nn::Linear(1'000, 500).ptr();  // 2 MB
      const auto optimizer = std::make_shared<optim::SGD>(net->parameters(), optim::SGDOptions(0.1));
      const auto sync = std::make_shared<parallel::VirtualRankSync>(comm::Group(), options);
      sync->begin({.modules = {{"", net}}, .optimizers = {{"", optimizer, nullptr}}});
      sync->set_exchange(exchange.shared_from_this());
      for (int step = 0; step < 3; ++step) {
        sync->begin_step();
        const parallel::ShareRange range = sync->shares();
        for (std::int64_t share = range.first; share < range.first + range.count; ++share) {
          sync->begin_share(share, 1);
          for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
        }
        sync->end_shares();
        sync->average(*optimizer, 1, true);
      }
      planned[Ring::at(process)] =
          parallel::plan_virtual_ranks(net->parameters(), {{"", net}}, options, process, size);
      syncs[Ring::at(process)] = sync;
    });
    for (int process = 0; process < size; ++process) {
      const auto used = static_cast<double>(ring.nodes[Ring::at(process)]->shared_metrics().bytes_in_use);
      const auto expected =
          static_cast<double>(planned[Ring::at(process)].sums + planned[Ring::at(process)].exchange);
      // Blocks have whole pages, and the bias is a small bucket of its own.
      EXPECT_NEAR(used, expected, 65'536)
          << process << " of " << size << ", " << virtual_ranks << " virtual ranks";
    }
    for (const auto& sync : syncs) sync->set_exchange(nullptr);
  }
}

TEST(NetSliceExchangeTest, ATransferEndsWithItsGeneration) {
  Ring ring(2, "local");
  const at::Tensor bytes = at::arange(10, at::kByte);
  const auto transfer = ring.exchanges[1]->broadcast(bytes);  // process 0 sends nothing
  std::thread waiter([&] {
    COHORT_EXPECT_THROW_WITH(transfer(), GenerationEnded,
                             "generation 1 has ended: generation 2 follows: a test");
  });
  ring.inboxes[1]->on_order(order_of(2, 1, 2));
  waiter.join();
  ring.inboxes[1]->enter([](const membership::Generation&) {});
  COHORT_EXPECT_THROW_WITH(transfer(), GenerationEnded, "this process has left it");
}

// Over shared memory and over TCP. What a process's death takes is in process_groups_test.cpp.
TEST(NetSliceExchangeTest, ATransferThatWaitsThrowsWithinMilliseconds) {
  using Clock = std::chrono::steady_clock;
  for (const char* const listen : {"local", "127.0.0.1:0"}) {
    std::vector<double> times;
    for (int round = 0; round < 9; ++round) {
      Ring ring(2, listen);
      const auto transfer = ring.exchanges[1]->broadcast(at::arange(10, at::kByte));
      std::atomic<bool> waits{false};
      Clock::time_point thrown;
      std::thread waiter([&] {
        waits = true;
        COHORT_EXPECT_THROW_WITH(transfer(), GenerationEnded, "generation 1 has ended");
        thrown = Clock::now();
      });
      test::wait_until([&] { return waits.load(); });
      const Clock::time_point begin = Clock::now();
      ring.inboxes[1]->on_order(order_of(2, 1, 2));
      waiter.join();
      times.push_back(std::chrono::duration<double, std::milli>(thrown - begin).count());
    }
    std::ranges::sort(times);
    std::cout << listen << ": a transfer that waits has thrown after " << times[4] << " ms, at most "
              << times.back() << " ms\n";
    EXPECT_LT(times[4], 100 * test::kSlowdown);
  }
}

TEST(NetSliceExchangeTest, APlannedChangeWaitsForTheStep) {
  Ring ring(2, "local");
  const at::Tensor bytes = at::arange(10, at::kByte);
  ring.inboxes[1]->on_order(order_of(2, 1, 2, /*is_planned=*/true));
  std::thread sender([&] { ring.exchanges[0]->broadcast(bytes)(); });
  const at::Tensor got = at::empty({10}, at::kByte);
  EXPECT_TRUE(ring.inboxes[1]->must_enter());
  EXPECT_FALSE(ring.inboxes[1]->must_leave());
  ring.exchanges[1]->broadcast(got)();
  sender.join();
  EXPECT_TRUE(at::equal(got, bytes));
  // A fellow's hello says that nobody finishes the next step.
  const auto transfer = ring.exchanges[1]->broadcast(got);
  net::Message message;
  message.channel = 1;
  message.header = encode({.type = WireType::kHello, .from = 0, .generation = 2, .number = 0, .value = 1});
  ring.inboxes[0]->peer_of(1)->send(std::move(message));
  COHORT_EXPECT_THROW_WITH(transfer(), GenerationEnded, "generation 2 follows");
  EXPECT_TRUE(ring.inboxes[1]->must_leave());
}

TEST(NetSliceExchangeTest, ALostProcessEndsTransfersThatNeedIt) {
  Ring ring(3, "local");
  const at::Tensor bytes = at::arange(10, at::kByte);
  ring.exchanges[0]->broadcast(bytes)();
  test::wait_until([&] { return ring.nodes[0]->close(base::Deadline(milliseconds(1'000))).empty(); });
  const at::Tensor got = at::empty({10}, at::kByte);
  // What it has sent counts.
  ring.exchanges[1]->broadcast(got)();
  EXPECT_TRUE(at::equal(got, bytes));
  COHORT_EXPECT_THROW_WITH(ring.exchanges[1]->broadcast(got)(), GenerationEnded, "process 0 is lost");
  EXPECT_TRUE(ring.inboxes[1]->must_enter());
}

TEST(NetSliceExchangeTest, ATimeoutNamesWhoDidNotSend) {
  Ring ring(3, "local", milliseconds(50));
  const at::Tensor own = at::arange(10, at::kByte), all = at::empty({30}, at::kByte);
  ring.exchanges[1]->all_gather(at::empty({30}, at::kByte), own);
  COHORT_EXPECT_THROW_WITH(ring.exchanges[0]->all_gather(all, own)(), GenerationEnded,
                           "all_gather 0 of generation 1, in which process 0 waits for 2");
  EXPECT_TRUE(ring.inboxes[0]->must_enter());
}

TEST(NetSliceExchangeTest, OtherSizesAreAnError) {
  Ring ring(2, "local");
  const at::Tensor ten = at::arange(10, at::kByte), nine = at::arange(9, at::kByte);
  ring.exchanges[0]->broadcast(ten);
  COHORT_EXPECT_THROW_WITH(ring.exchanges[1]->broadcast(nine)(), CommError,
                           "process 0 sent 10 bytes, expected 9");
  COHORT_EXPECT_THROW_WITH(ring.exchanges[0]->all_gather(nine, ten), UsageError,
                           "has 9 bytes, expected 2 times 10");
  COHORT_EXPECT_THROW_WITH(ring.exchanges[0]->all_to_all(nine, ten, {5, 5}, {5, 5}), UsageError,
                           "do not fit");
  COHORT_EXPECT_THROW_WITH(ring.exchanges[0]->broadcast(at::arange(8, at::kByte).slice(0, 0, 8, 2)),
                           UsageError, "not contiguous");
}

TEST(WireTest, AHeaderIsReadAsItWasWritten) {
  const Wire wire{WireType::kChunk, 3, ~std::uint32_t{0}, 7, ~std::uint64_t{0}, 5, 6, "text"};
  EXPECT_EQ(decode(encode(wire)), wire);
  std::string header = encode(wire);
  header[4] = 100;
  COHORT_EXPECT_THROW_WITH(decode(header), CommError, "cannot be read");
  COHORT_EXPECT_THROW_WITH(decode(header.substr(0, 20)), CommError, "cannot be read: 20 bytes");
}

}  // namespace
}  // namespace cohort::elastic
