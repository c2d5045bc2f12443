// The base of backends of our own, with a backend that records what it is told to do: each overload of c10d
// arrives as one form of call, and what does not fit is rejected. The backends have tests of their own.
#include "cohort/comm/internal/cpu_backend.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/support/profiled_calls.h"
#include "tests/support/throws.h"

namespace cohort::comm {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout(5000);

class Recorder : public CpuBackend {
 public:
  Recorder(int rank, int size) : CpuBackend("recorder", rank, size, kTimeout) {}

  const CpuCall& last() const { return calls.back(); }

  std::vector<CpuCall> calls;
  bool rejects_everything = false;

 private:
  WorkPtr begin(CpuCall&& call) override {
    calls.push_back(std::move(call));
    return completed(calls.back());
  }
  void check(const CpuCall& call) const override {
    TORCH_CHECK(!rejects_everything, caller(call.type), " is not for today");
  }
};

class CpuBackendTest : public testing::Test {
 protected:
  static at::Tensor of(std::int64_t numel, at::ScalarType dtype = at::kFloat) {
    return at::ones({numel}, dtype);
  }
  static Tensors list(int count, std::int64_t numel) {
    Tensors tensors;
    for (int i = 0; i < count; ++i) tensors.push_back(of(numel));
    return tensors;
  }
  static bool same(const Tensors& got, const Tensors& expected) {
    return std::ranges::equal(got, expected, [](const auto& a, const auto& b) { return a.is_same(b); });
  }
  static Tensors joined(Tensors first, const Tensors& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
  // What arrived, and that its work has the results.
  void expect_call(const c10::intrusive_ptr<c10d::Work>& work, CallType type, OpType op_type,
                   const Tensors& outputs, const Tensors& inputs, int peer = -1) {
    const CpuCall& call = backend.last();
    EXPECT_EQ(call.type, type);
    EXPECT_EQ(call.op_type, op_type);
    EXPECT_EQ(work->retrieveOpType(), op_type);
    EXPECT_TRUE(same(call.outputs, outputs));
    EXPECT_TRUE(same(call.inputs, inputs));
    EXPECT_TRUE(same(work->result(), outputs));
    EXPECT_EQ(call.peer, peer);
    EXPECT_EQ(call.is_message(), type == CallType::kSend || type == CallType::kRecv);
    EXPECT_EQ(call.number + 1, backend.getSequenceNumberForGroup());
  }

  Recorder backend{1, 3};
  Recorder root{0, 3};
  Tensors single = list(1, 4), two = list(2, 4), three = list(3, 4), none;
  TensorLists no_lists;
};

TEST_F(CpuBackendTest, ReductionsArriveWithTheTypeOfEachOutput) {
  expect_call(backend.allreduce(single, {}), CallType::kAllReduce, OpType::ALLREDUCE, single, {});
  ASSERT_EQ(backend.last().reductions.size(), 1U);
  EXPECT_EQ(backend.last().reductions[0].dtype, Dtype::kFloat);
  EXPECT_EQ(backend.last().reductions[0].op, Op::kSum);

  Tensors mixed{of(2, at::kInt), of(3, at::kComplexDouble)};
  c10d::AllreduceCoalescedOptions average;
  average.reduceOp = c10d::ReduceOp::AVG;
  expect_call(backend.allreduce_coalesced(mixed, average), CallType::kAllReduce, OpType::ALLREDUCE_COALESCED,
              mixed, {});
  EXPECT_EQ(backend.last().num_collectives(), 2U);
  EXPECT_EQ(backend.last().reductions[0].dtype, Dtype::kInt32);
  EXPECT_EQ(backend.last().reductions[1].per_element, 2U);
  EXPECT_EQ(backend.last().reductions[1].op, Op::kAvg);

  c10d::ReduceOptions reduce;
  reduce.reduceOp = c10d::ReduceOp::MAX;
  reduce.rootRank = 2;
  expect_call(backend.reduce(single, reduce), CallType::kReduce, OpType::REDUCE, single, {}, 2);
  EXPECT_EQ(backend.last().reductions[0].op, Op::kMax);
}

TEST_F(CpuBackendTest, BroadcastHasItsRootAndBarrierNothing) {
  c10d::BroadcastOptions options;
  options.rootRank = 2;
  expect_call(backend.broadcast(single, options), CallType::kBroadcast, OpType::BROADCAST, single, {}, 2);
  EXPECT_TRUE(backend.last().reductions.empty());
  expect_call(backend.barrier({}), CallType::kBarrier, OpType::BARRIER, {}, {});
  EXPECT_EQ(backend.last().num_collectives(), 1U);
}

TEST_F(CpuBackendTest, EveryFormOfAllGatherIsOneCallWithAPlaceForEachRank) {
  Tensors input = list(1, 2), wholes = list(2, 6), inputs = list(2, 2);
  TensorLists lists{list(3, 2)};
  expect_call(backend.allgather(lists, input, {}), CallType::kAllGather, OpType::ALLGATHER, lists[0], input);
  EXPECT_FALSE(backend.last().is_whole());
  EXPECT_EQ(backend.last().output_parts(0, 3), pointers(lists[0]));

  expect_call(backend._allgather_base(wholes[0], input[0], {}), CallType::kAllGather, OpType::_ALLGATHER_BASE,
              {wholes[0]}, input);
  EXPECT_TRUE(backend.last().is_whole());
  EXPECT_EQ(backend.last().output_parts(0, 3), parts_of(wholes[0], 3));

  expect_call(backend.allgather_into_tensor_coalesced(wholes, inputs, {}), CallType::kAllGather,
              OpType::_ALLGATHER_BASE, wholes, inputs);
  EXPECT_EQ(backend.last().num_collectives(), 2U);
  EXPECT_EQ(backend.last().output_parts(1, 3), parts_of(wholes[1], 3));

  TensorLists of_ranks{list(2, 2), list(2, 2), list(2, 2)};
  const Tensors first{of_ranks[0][0], of_ranks[1][0], of_ranks[2][0]};
  const Tensors second{of_ranks[0][1], of_ranks[1][1], of_ranks[2][1]};
  expect_call(backend.allgather_coalesced(of_ranks, inputs, {}), CallType::kAllGather,
              OpType::ALLGATHER_COALESCED, joined(first, second), inputs);
  EXPECT_EQ(backend.last().num_collectives(), 2U);
  EXPECT_EQ(backend.last().output_parts(0, 3), pointers(first));
  EXPECT_EQ(backend.last().output_parts(1, 3), pointers(second));
}

TEST_F(CpuBackendTest, OnlyTheRootOfGatherAndScatterHasParts) {
  TensorLists lists{three};
  expect_call(backend.gather(no_lists, single, {}), CallType::kGather, OpType::GATHER, {}, single, 0);
  EXPECT_TRUE(backend.last().output_parts(0, 3).empty());
  expect_call(backend.scatter(single, no_lists, {}), CallType::kScatter, OpType::SCATTER, single, {}, 0);
  EXPECT_TRUE(backend.last().input_parts(0, 3).empty());
  EXPECT_TRUE(same(root.gather(lists, single, {})->result(), three));
  EXPECT_EQ(root.last().output_parts(0, 3), pointers(three));
  root.scatter(single, lists, {});
  EXPECT_TRUE(same(root.last().inputs, three));
  EXPECT_EQ(root.last().input_parts(0, 3), pointers(three));
}

TEST_F(CpuBackendTest, EveryFormOfReduceScatterIsOneCallWithAPartOfEachRank) {
  Tensors output = list(1, 2), outputs = list(2, 2), wholes = list(2, 6);
  TensorLists lists{list(3, 2)}, two_lists{list(3, 2), list(3, 2)};
  expect_call(backend.reduce_scatter(output, lists, {}), CallType::kReduceScatter, OpType::REDUCE_SCATTER,
              output, lists[0]);
  EXPECT_FALSE(backend.last().is_whole());
  EXPECT_EQ(backend.last().input_parts(0, 3), pointers(lists[0]));
  EXPECT_EQ(backend.last().reductions.size(), 1U);

  backend.reduce_scatter(outputs, two_lists, {});
  EXPECT_EQ(backend.last().num_collectives(), 2U);
  EXPECT_EQ(backend.last().input_parts(1, 3), pointers(two_lists[1]));

  expect_call(backend._reduce_scatter_base(output[0], wholes[0], {}), CallType::kReduceScatter,
              OpType::_REDUCE_SCATTER_BASE, output, {wholes[0]});
  EXPECT_TRUE(backend.last().is_whole());
  expect_call(backend.reduce_scatter_tensor_coalesced(outputs, wholes, {}), CallType::kReduceScatter,
              OpType::_REDUCE_SCATTER_BASE, outputs, wholes);
  EXPECT_EQ(backend.last().input_parts(1, 3), parts_of(wholes[1], 3));
  EXPECT_EQ(backend.last().reductions.size(), 2U);
}

TEST_F(CpuBackendTest, AllToAllIsMemoryForEachRank) {
  const auto sizes = [](const std::vector<Span>& parts) {
    std::vector<std::size_t> bytes;
    for (const Span& part : parts) bytes.push_back(part.bytes);
    return bytes;
  };
  at::Tensor output = at::ones({4, 2}), input = at::ones({6, 2});
  std::vector<std::int64_t> received{0, 2, 2}, equal;
  expect_call(backend.alltoall_base(output, input, received, equal, {}), CallType::kAllToAll,
              OpType::ALLTOALL_BASE, {output}, {input});
  EXPECT_EQ(sizes(backend.last().received), (std::vector<std::size_t>{0, 16, 16}));
  EXPECT_EQ(sizes(backend.last().sent), (std::vector<std::size_t>{16, 16, 16}));
  EXPECT_EQ(backend.last().received[2].data, data_of(output) + 16);

  Tensors outputs{of(1), of(4), of(3)};
  expect_call(backend.alltoall(outputs, three, {}), CallType::kAllToAll, OpType::ALLTOALL, outputs, three);
  EXPECT_EQ(sizes(backend.last().received), (std::vector<std::size_t>{4, 16, 12}));
  EXPECT_EQ(backend.last().sent[1].data, data_of(three[1]));
}

TEST_F(CpuBackendTest, MessagesHavePeerAndTag) {
  expect_call(backend.send(single, 2, 7), CallType::kSend, OpType::SEND, {}, single, 2);
  EXPECT_EQ(backend.last().tag, 7);
  expect_call(backend.recv(single, 0, 8), CallType::kRecv, OpType::RECV, single, {}, 0);
  EXPECT_EQ(backend.last().tag, 8);
  expect_call(backend.recvAnysource(single, 9), CallType::kRecv, OpType::RECVANYSOURCE, single, {}, -1);
  EXPECT_EQ(backend.last().tag, 9);
}

TEST_F(CpuBackendTest, ACallHasItsTimeoutOrTheBackends) {
  c10d::BarrierOptions options;
  backend.barrier(options);
  EXPECT_EQ(backend.last().timeout, kTimeout);
  options.timeout = milliseconds(300);
  backend.barrier(options);
  EXPECT_EQ(backend.last().timeout, milliseconds(300));
  backend.setTimeout(milliseconds(70));
  backend.send(single, 0, 0);
  EXPECT_EQ(backend.last().timeout, milliseconds(70));
  EXPECT_EQ(backend.getBackendOptions()->timeout, milliseconds(70));
  EXPECT_EQ(backend.getBackendOptions()->backend, "recorder");
  EXPECT_EQ(backend.getBackendName(), "recorder");
}

TEST_F(CpuBackendTest, AFactorScalesWhatIsReducedInPlaceAndCopiesInputs) {
  const c10d::ReduceOp twice = c10d::makePreMulSum<double>(2.0);
  c10d::AllreduceOptions all;
  all.reduceOp = twice;
  backend.allreduce(single, all);
  EXPECT_TRUE(single[0].eq(2).all().item<bool>());
  EXPECT_EQ(backend.last().reductions[0].op, Op::kSum);
  Tensors output = list(1, 2), input = list(1, 6);
  c10d::ReduceScatterOptions options;
  options.reduceOp = twice;
  backend.reduce_scatter_tensor_coalesced(output, input, options);
  EXPECT_TRUE(input[0].eq(1).all().item<bool>());
  EXPECT_TRUE(backend.last().inputs[0].eq(2).all().item<bool>());
}

TEST_F(CpuBackendTest, NoTensorIsCopied) {
  const std::int64_t references = single[0].use_count();
  backend.allreduce(single, {});
  EXPECT_EQ(data_of(backend.last().outputs[0]), data_of(single[0]));
  backend.calls.clear();
  EXPECT_EQ(single[0].use_count(), references) << "what is over keeps nothing";
}

// ------------------------------------------------------------------------------------------------ rejections

// Nothing has begun, and the next call has the number that this one did not take.
#define EXPECT_REJECTED(statement, part)                                                   \
  do {                                                                                     \
    COHORT_EXPECT_THROW_WITH(statement, c10::Error, "Backend recorder: " part);            \
    EXPECT_TRUE(backend.calls.empty() && root.calls.empty());                              \
    EXPECT_EQ(backend.getSequenceNumberForGroup() + root.getSequenceNumberForGroup(), 0U); \
  } while (false)

TEST_F(CpuBackendTest, TensorsThatAreNoMemoryOfTheCpuAreRejectedByEveryCall) {
  Tensors meta{at::ones({4}, at::kMeta)}, strided{at::ones({4, 4}).t()}, sparse{at::ones({4}).to_sparse()};
  TensorLists lists{three}, bad_lists{{of(4), of(4), at::ones({8}).slice(0, 0, 8, 2)}};
  std::vector<std::int64_t> equal;
  EXPECT_REJECTED(backend.allreduce(meta, {}), "all_reduce: got a tensor on meta, expected one on the CPU");
  EXPECT_REJECTED(backend.allreduce_coalesced(strided, {}), "all_reduce: got a tensor of strides [1, 4]");
  EXPECT_REJECTED(backend.broadcast(sparse, {}), "broadcast: got a sparse tensor, expected a dense one");
  EXPECT_REJECTED(backend.reduce(strided, {}), "reduce: got a tensor of strides");
  EXPECT_REJECTED(backend.allgather(lists, strided, {}), "all_gather: got a tensor of strides");
  EXPECT_REJECTED(backend.allgather(bad_lists, single, {}), "all_gather: got a tensor of strides [2]");
  EXPECT_REJECTED(backend._allgather_base(strided[0], single[0], {}), "all_gather: got a tensor of strides");
  EXPECT_REJECTED(backend.gather(no_lists, meta, {}), "gather: got a tensor on meta");
  EXPECT_REJECTED(root.gather(bad_lists, single, {}), "gather: got a tensor of strides [2]");
  EXPECT_REJECTED(backend.scatter(meta, no_lists, {}), "scatter: got a tensor on meta");
  EXPECT_REJECTED(root.scatter(single, bad_lists, {}), "scatter: got a tensor of strides [2]");
  EXPECT_REJECTED(backend.reduce_scatter(single, bad_lists, {}),
                  "reduce_scatter: got a tensor of strides [2]");
  EXPECT_REJECTED(backend._reduce_scatter_base(single[0], strided[0], {}),
                  "reduce_scatter: got a tensor of strides");
  EXPECT_REJECTED(backend.alltoall_base(strided[0], single[0], equal, equal, {}),
                  "all_to_all: got a tensor of strides");
  EXPECT_REJECTED(backend.alltoall(three, bad_lists[0], {}), "all_to_all: got a tensor of strides [2]");
  EXPECT_REJECTED(backend.send(strided, 0, 0), "send: got a tensor of strides");
  EXPECT_REJECTED(backend.recv(meta, 0, 0), "recv: got a tensor on meta");
  EXPECT_REJECTED(backend.recvAnysource(sparse, 0), "recv: got a sparse tensor");
}

TEST_F(CpuBackendTest, NumbersOfTensorsThatDoNotFitAreRejected) {
  TensorLists short_list{two}, two_lists{three, three}, of_ranks{two, two, single};
  EXPECT_REJECTED(backend.allreduce(two, {}), "all_reduce: got 2 tensors, expected one");
  EXPECT_REJECTED(backend.allreduce_coalesced(none, {}), "all_reduce: got no tensors, expected one at least");
  EXPECT_REJECTED(backend.broadcast(none, {}), "broadcast: got 0 tensors, expected one");
  EXPECT_REJECTED(backend.allgather(two_lists, single, {}),
                  "all_gather: got 2 lists of tensors, expected one");
  EXPECT_REJECTED(backend.allgather(short_list, single, {}),
                  "all_gather: got 2 tensors, expected one for each of 3");
  EXPECT_REJECTED(backend.allgather_coalesced(two_lists, single, {}),
                  "all_gather: got 2 lists, expected one for each of 3 ranks");
  EXPECT_REJECTED(backend.allgather_coalesced(of_ranks, two, {}),
                  "all_gather: got a list of 1 tensors, expected 2");
  EXPECT_REJECTED(backend.allgather_coalesced(of_ranks, none, {}), "all_gather: got no tensors");
  EXPECT_REJECTED(backend.allgather_into_tensor_coalesced(two, single, {}),
                  "all_gather: got 2 outputs and 1 inputs");
  EXPECT_REJECTED(root.gather(no_lists, single, {}), "gather: got 0 lists of tensors, expected one");
  EXPECT_REJECTED(root.scatter(single, short_list, {}),
                  "scatter: got 2 tensors, expected one for each of 3 ranks");
  EXPECT_REJECTED(backend.reduce_scatter(single, two_lists, {}),
                  "reduce_scatter: got 1 outputs and 2 inputs");
  EXPECT_REJECTED(backend.reduce_scatter(single, short_list, {}),
                  "reduce_scatter: got 2 tensors, expected one for each");
  EXPECT_REJECTED(backend.reduce_scatter_tensor_coalesced(none, none, {}), "reduce_scatter: got 0 outputs");
  EXPECT_REJECTED(backend.alltoall(three, two, {}),
                  "all_to_all: got 2 tensors, expected one for each of 3 ranks");
  EXPECT_REJECTED(backend.send(two, 0, 0), "send: got 2 tensors, expected one");
}

TEST_F(CpuBackendTest, SizesAndTypesThatDoNotFitAreRejected) {
  at::Tensor five = of(5), ints = of(12, at::kInt), twelve = of(12);
  TensorLists ints_list{{of(4, at::kInt), of(4, at::kInt), of(4, at::kInt)}},
      of_ranks{two, two, {of(4), of(5)}};
  std::vector<std::int64_t> equal, wrong{1, 2, 3};
  EXPECT_REJECTED(backend.allgather(ints_list, single, {}), "all_gather: got Int[4] beside Float[4]");
  EXPECT_REJECTED(backend.allgather_coalesced(of_ranks, two, {}), "all_gather: got Float[5] beside Float[4]");
  EXPECT_REJECTED(backend._allgather_base(five, single[0], {}), "all_gather: got Float[5] beside Float[4]");
  EXPECT_REJECTED(backend._allgather_base(ints, single[0], {}), "all_gather: got Int[12] beside Float[4]");
  EXPECT_REJECTED(root.gather(ints_list, single, {}), "gather: got Int[4] beside Float[4]");
  EXPECT_REJECTED(root.scatter(single, ints_list, {}), "scatter: got Int[4] beside Float[4]");
  EXPECT_REJECTED(backend.reduce_scatter(single, ints_list, {}),
                  "reduce_scatter: got Int[4] beside Float[4]");
  EXPECT_REJECTED(backend._reduce_scatter_base(single[0], five, {}),
                  "reduce_scatter: got Float[5] beside Float[4]");
  EXPECT_REJECTED(backend.alltoall_base(ints, twelve, equal, equal, {}),
                  "all_to_all: got Float to exchange for Int, expected one type");
  std::vector<std::int64_t> own{4, 5, 3};
  EXPECT_REJECTED(backend.alltoall_base(twelve, twelve, own, equal, {}),
                  "all_to_all: got 16 bytes for this rank itself, expected 20");
  EXPECT_REJECTED(backend.alltoall(ints_list[0], three, {}),
                  "all_to_all: got Float to exchange for Int, expected one type");
  EXPECT_REJECTED(backend.alltoall_base(five, twelve, equal, equal, {}),
                  "all_to_all: got 5 rows, which do not divide by 3 ranks");
  EXPECT_REJECTED(backend.alltoall_base(twelve, twelve, equal, wrong, {}),
                  "all_to_all: got parts of [1, 2, 3] rows, expected 12 in all for 3 ranks");
}

TEST_F(CpuBackendTest, RanksAndOperationsThatThereAreNotAreRejectedBeforeATensorIsScaled) {
  c10d::BroadcastOptions broadcast;
  broadcast.rootRank = 3;
  EXPECT_REJECTED(backend.broadcast(single, broadcast), "broadcast: got rank 3, expected 0 to 2");
  c10d::ReduceOptions reduce;
  reduce.rootRank = -1;
  EXPECT_REJECTED(backend.reduce(single, reduce), "reduce: got rank -1, expected 0 to 2");
  EXPECT_REJECTED(backend.send(single, 3, 0), "send: got rank 3, expected 0 to 2");
  EXPECT_REJECTED(backend.recv(single, -1, 0), "recv: got rank -1, expected 0 to 2");
  c10d::GatherOptions gather;
  gather.rootRank = 7;
  EXPECT_REJECTED(backend.gather(no_lists, single, gather), "gather: got rank 7");
  c10d::AllreduceOptions all;
  all.reduceOp = c10d::ReduceOp::BAND;
  EXPECT_REJECTED(backend.allreduce(single, all), "all_reduce does not support BAND of Float");
  c10d::AllreduceCoalescedOptions coalesced;
  coalesced.reduceOp = c10d::makePreMulSum<double>(2.0);
  Tensors mixed{of(2), of(2).to(at::kFloat8_e4m3fn)};
  EXPECT_REJECTED(backend.allreduce_coalesced(mixed, coalesced),
                  "all_reduce does not support SUM of Float8_e4m3fn");
  EXPECT_TRUE(mixed[0].eq(1).all().item<bool>());
  coalesced.reduceOp = c10d::makePreMulSum<double>(0.5);
  Tensors with_ints{of(2), of(2, at::kLong)};
  EXPECT_REJECTED(backend.allreduce_coalesced(with_ints, coalesced),
                  "all_reduce does not support PREMUL_SUM of Long");
  EXPECT_TRUE(with_ints[0].eq(1).all().item<bool>());
  backend.rejects_everything = true;
  all.reduceOp = c10d::makePreMulSum<double>(2.0);
  EXPECT_REJECTED(backend.allreduce(single, all), "all_reduce is not for today");
  EXPECT_TRUE(single[0].eq(1).all().item<bool>());
}

// ---------------------------------------------------------------------------------------------------- work

TEST(CpuWorkTest, EndsOnceForWhoWaitsAndForItsFuture) {
  const Tensors results{at::ones({2})};
  const auto work = c10::make_intrusive<CpuWork>(0, OpType::ALLREDUCE, results);
  const auto early = work->getFuture();
  std::atomic<bool> has_waited{false};
  early->addCallback([&](c10::ivalue::Future& /*done*/) { has_waited = work->wait(); });
  EXPECT_FALSE(work->isCompleted() || early->completed());
  std::thread other([&] { work->end(); });
  EXPECT_TRUE(work->wait());
  other.join();
  EXPECT_TRUE(has_waited) << "a callback may wait for the work";
  EXPECT_TRUE(work->isCompleted() && work->isSuccess() && early->completed());
  EXPECT_TRUE(work->getFuture()->value().toTensorVector()[0].is_same(results[0]));
}

TEST(CpuWorkTest, AFutureThatIsAskedForLaterIsCompleteToo) {
  const auto done = c10::make_intrusive<CpuWork>(0, OpType::BARRIER, Tensors());
  done->end();
  EXPECT_TRUE(done->getFuture()->completed());
  const auto failed = c10::make_intrusive<CpuWork>(0, OpType::BARRIER, Tensors());
  failed->end(std::make_exception_ptr(std::runtime_error("no luck")));
  EXPECT_TRUE(failed->getFuture()->hasError());
  EXPECT_FALSE(failed->isSuccess());
  COHORT_EXPECT_THROW_WITH(failed->wait(), std::runtime_error, "no luck");
}

TEST_F(CpuBackendTest, ACallIsProfiledUntilTheBackendLetsGoOfIt) {
  test::ProfiledCalls profiled("recorder:");
  backend.setGroupUid("a group");
  backend.send(single, 0, 0);
  TensorLists lists{three};
  root.gather(lists, single, {});
  backend.calls.clear();
  auto seen = profiled.finish();
  EXPECT_EQ(seen["recorder:send"].bytes, 16) << "what goes in, where nothing comes out";
  EXPECT_EQ(seen["recorder:send"].group, "a group");
  EXPECT_EQ(seen["recorder:send"].ended, 1);
  EXPECT_EQ(seen["recorder:gather"].bytes, 48);
  EXPECT_EQ(seen["recorder:gather"].ended, 0) << "it is under way";
}

}  // namespace
}  // namespace cohort::comm
