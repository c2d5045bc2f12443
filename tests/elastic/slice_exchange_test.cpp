#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/elastic/internal/net_slice_exchange.h"
#include "cohort/elastic/session.h"
#include "ring.h"
#include "tests/support/comes_true.h"
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

TEST(NetSliceExchangeTest, LongPiecesGoByHandle) {
  Ring ring(2, "local");
  ring.run([](int, NetSliceExchange& exchange) {
    const at::Tensor own = bytes_from(1, 1 << 20, exchange);
    exchange.all_gather(exchange.empty(2 << 20, own.options()), own)();
  });
  EXPECT_EQ(ring.inboxes[0]->peer_of(1)->metrics().bytes_by_handle, std::uint64_t{1} << 20);
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
  message.header = encode({.kind = Kind::kHello, .from = 0, .generation = 2, .number = 0, .value = 1});
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
  const Wire wire{Kind::kChunk, 3, 7, ~std::uint64_t{0}, 5, 6, "text"};
  EXPECT_EQ(decode(encode(wire)), wire);
  std::string header = encode(wire);
  header[4] = 100;
  COHORT_EXPECT_THROW_WITH(decode(header), CommError, "cannot be read");
  COHORT_EXPECT_THROW_WITH(decode(header.substr(0, 20)), CommError, "cannot be read: 20 bytes");
}

}  // namespace
}  // namespace cohort::elastic
