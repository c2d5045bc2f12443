#include "cohort/comm/mpi/mpi.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <numeric>

#include "cohort/comm/backend.h"
#include "cohort/comm/mpi/process.h"
#include "cohort/core/error.h"

namespace cohort::comm::mpi {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;

void check_tensor(const char* call, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_cpu() && tensor.layout() == at::kStrided, "Backend mpi: ", call,
              " takes dense tensors on the CPU, got one on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "Backend mpi: ", call, " takes contiguous tensors, got strides ",
              tensor.strides());
}

void check_tensors(const char* call, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) check_tensor(call, tensor);
}

at::Tensor only(const char* call, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Backend mpi: ", call, " takes one tensor, got ", tensors.size());
  check_tensor(call, tensors[0]);
  return tensors[0];
}

void check_sizes(const char* call, const at::Tensor& big, const at::Tensor& small, int size) {
  check_tensor(call, big);
  check_tensor(call, small);
  TORCH_CHECK(big.scalar_type() == small.scalar_type() && big.numel() == small.numel() * size,
              "Backend mpi: ", call, ": ", big.toString(), big.sizes(), " is not ", size, " times ",
              small.toString(), small.sizes());
}

void check_same_number(const char* call, std::size_t a, std::size_t b) {
  TORCH_CHECK(a == b, "Backend mpi: ", call, ": got ", a, " and ", b, " tensors");
}

// What is to be done with numbers that were multiplied, where that is asked for, by factor_of().
ReduceOp plain(const c10d::ReduceOp& op) {
  const ReduceOp type = op;
  return type == c10d::ReduceOp::PREMUL_SUM ? ReduceOp{c10d::ReduceOp::SUM} : type;
}

// PREMUL_SUM: each rank's own factor, before anything is summed.
void multiply(at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (static_cast<ReduceOp>(op) != c10d::ReduceOp::PREMUL_SUM) return;
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(factor != nullptr, "Backend mpi: PREMUL_SUM without a factor");
  if (factor->tensor_factor.defined()) {
    tensor.mul_(factor->tensor_factor);
  } else {
    tensor.mul_(factor->double_factor);
  }
}

at::Tensor multiplied(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (static_cast<ReduceOp>(op) != c10d::ReduceOp::PREMUL_SUM) return tensor;
  at::Tensor copy = tensor.clone();
  multiply(copy, op);
  return copy;
}

// Rows of dimension 0, dealt out to the ranks.
std::vector<Message> rows_of(const char* call, const at::Tensor& tensor,
                             const std::vector<std::int64_t>& rows, int size) {
  check_tensor(call, tensor);
  std::vector<std::int64_t> counts = rows;
  if (counts.empty()) {
    TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) % size == 0, "Backend mpi: ", call, ": ", tensor.sizes(),
                " does not divide by ", size, " ranks");
    counts.assign(static_cast<std::size_t>(size), tensor.size(0) / size);
  }
  TORCH_CHECK(static_cast<int>(counts.size()) == size && tensor.dim() > 0 &&
                  std::ranges::none_of(counts, [](std::int64_t n) { return n < 0; }) &&
                  std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == tensor.size(0),
              "Backend mpi: ", call, ": rows ", counts, " of ", tensor.sizes(), " for ", size, " ranks");
  std::vector<Message> messages;
  std::int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const std::int64_t count = counts[static_cast<std::size_t>(rank)];
    messages.push_back({tensor.narrow(0, begin, count), rank});
    begin += count;
  }
  return messages;
}

}  // namespace

MpiBackend::MpiBackend(Engine& engine, PlacePtr place, milliseconds timeout)
    : Backend(place->rank, place->size), engine_(engine), place_(std::move(place)), timeout_(timeout) {
  engine_.be_patient(timeout);
}

MpiBackend::WorkPtr MpiBackend::submit(const char* name, OpType type, Tensors results, Steps steps,
                                       milliseconds timeout) {
  auto call = c10::make_intrusive<Call>(CallText{name, number_.fetch_add(1), pg_uid_, rank_, size_}, type,
                                        std::move(results), std::move(steps),
                                        timeout.count() > 0 ? timeout : timeout_, place_->lane);
  engine_.submit(call);
  return call;
}

MpiBackend::WorkPtr MpiBackend::submit_message(const char* name, OpType type, Tensors results, Steps steps) {
  auto call = c10::make_intrusive<Call>(CallText{name, number_.fetch_add(1), pg_uid_, rank_, size_}, type,
                                        std::move(results), std::move(steps), timeout_, nullptr);
  engine_.submit(call);
  return call;
}

MpiBackend::WorkPtr MpiBackend::reduce_all(Tensors& tensors, const c10d::ReduceOp& op, milliseconds timeout) {
  Steps steps;
  for (at::Tensor& tensor : tensors) {
    check_tensor("all_reduce", tensor);
    check_reducible(tensor.scalar_type(), plain(op));
  }
  for (at::Tensor& tensor : tensors) {
    multiply(tensor, op);
    add_reduce(steps, place_, tensor, plain(op));
  }
  return submit("all_reduce", OpType::ALLREDUCE, tensors, std::move(steps), timeout);
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return reduce_all(tensors, options.reduceOp, options.timeout);
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors,
                                                    const c10d::AllreduceCoalescedOptions& options) {
  return reduce_all(tensors, options.reduceOp, options.timeout);
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Steps steps;
  add_broadcast(steps, place_, only("broadcast", tensors), static_cast<int>(options.rootRank));
  return submit("broadcast", OpType::BROADCAST, tensors, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  at::Tensor tensor = only("reduce", tensors);
  check_reducible(tensor.scalar_type(), plain(options.reduceOp));
  Steps steps;
  multiply(tensor, options.reduceOp);
  add_reduce(steps, place_, tensor, plain(options.reduceOp), static_cast<int>(options.rootRank));
  return submit("reduce", OpType::REDUCE, tensors, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  return allgather_coalesced(outputs, inputs, options);
}

MpiBackend::WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  check_same_number("all_gather", outputs.size(), inputs.size());
  check_tensors("all_gather", inputs);
  Steps steps;
  Tensors results;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Message> from = one_for_each("all_gather", outputs[i]), to;
    for (int rank = 0; rank < size_; ++rank) to.push_back({inputs[i], rank});
    for (const Message& message : from) check_sizes("all_gather", message.tensor, inputs[i], 1);
    results.insert(results.end(), outputs[i].begin(), outputs[i].end());
    add_exchange(steps, place_, std::move(to), std::move(from));
  }
  return submit("all_gather", OpType::ALLGATHER, std::move(results), std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  check_same_number("all_gather", outputs.size(), inputs.size());
  Steps steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_sizes("all_gather", outputs[i], inputs[i], size_);
    add_all_gather(steps, place_, outputs[i], inputs[i]);
  }
  return submit("all_gather", OpType::_ALLGATHER_BASE, outputs, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::gather(TensorLists& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  const auto root = static_cast<int>(options.rootRank);
  std::vector<Message> from;
  if (rank_ == root) {
    check_same_number("gather", outputs.size(), 1);
    from = one_for_each("gather", outputs[0]);
    for (const Message& message : from) check_sizes("gather", message.tensor, input, 1);
  }
  Steps steps;
  Tensors results = rank_ == root ? outputs[0] : Tensors{};
  add_exchange(steps, place_, {{input, root}}, std::move(from));
  return submit("gather", OpType::GATHER, std::move(results), std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ScatterOptions& options) {
  const at::Tensor output = only("scatter", outputs);
  const auto root = static_cast<int>(options.rootRank);
  std::vector<Message> to;
  if (rank_ == root) {
    check_same_number("scatter", inputs.size(), 1);
    to = one_for_each("scatter", inputs[0]);
    for (const Message& message : to) check_sizes("scatter", message.tensor, output, 1);
  }
  Steps steps;
  add_exchange(steps, place_, std::move(to), {{output, root}});
  return submit("scatter", OpType::SCATTER, outputs, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  check_same_number("reduce_scatter", outputs.size(), inputs.size());
  Tensors whole;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors flat;
    for (const Message& message : one_for_each("reduce_scatter", inputs[i])) {
      check_sizes("reduce_scatter", message.tensor, outputs[i], 1);
      flat.push_back(message.tensor.view({-1}));
    }
    whole.push_back(at::cat(flat));
  }
  return reduce_scatter_tensor_coalesced(outputs, whole, options);
}

MpiBackend::WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  check_same_number("reduce_scatter", outputs.size(), inputs.size());
  const ReduceOp op = plain(options.reduceOp);
  Steps steps;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check_sizes("reduce_scatter", inputs[i], outputs[i], size_);
    check_reducible(outputs[i].scalar_type(), op);
    add_reduce_scatter(steps, place_, outputs[i], multiplied(inputs[i], options.reduceOp), op);
  }
  return submit("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, outputs, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<std::int64_t>& output_rows,
                                              std::vector<std::int64_t>& input_rows,
                                              const c10d::AllToAllOptions& options) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "Backend mpi: all_to_all: got ", output.toString(),
              " and ", input.toString());
  Steps steps;
  add_exchange(steps, place_, rows_of("all_to_all", input, input_rows, size_),
               rows_of("all_to_all", output, output_rows, size_));
  return submit("all_to_all", OpType::ALLTOALL_BASE, {output}, std::move(steps), options.timeout);
}

MpiBackend::WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  Steps steps;
  add_exchange(steps, place_, one_for_each("all_to_all", inputs), one_for_each("all_to_all", outputs));
  return submit("all_to_all", OpType::ALLTOALL, outputs, std::move(steps), options.timeout);
}

std::vector<Message> MpiBackend::one_for_each(const char* call, const Tensors& tensors) const {
  check_same_number(call, tensors.size(), static_cast<std::size_t>(size_));
  check_tensors(call, tensors);
  std::vector<Message> messages;
  for (int rank = 0; rank < size_; ++rank)
    messages.push_back({tensors[static_cast<std::size_t>(rank)], rank});
  return messages;
}

int MpiBackend::check_message(const char* call, const Tensors& tensors, int tag) const {
  only(call, tensors);
  TORCH_CHECK(tag >= 0 && tag <= engine_.largest_tag(), "Backend mpi: ", call, ": tag is ", tag,
              ", expected 0 to ", engine_.largest_tag());
  return tag;
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
  Steps steps;
  add_send(steps, place_, only("send", tensors), to, check_message("send", tensors, tag));
  return submit_message("send", OpType::SEND, tensors, std::move(steps));
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
  Steps steps;
  add_receive(steps, place_, only("recv", tensors), from, check_message("recv", tensors, tag));
  return submit_message("recv", OpType::RECV, tensors, std::move(steps));
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only("recv", tensors);
  TORCH_CHECK(is_one_message(tensor), "Backend mpi: recv from any rank takes at most 1 GiB, got ",
              tensor.nbytes(), " bytes");
  Steps steps;
  add_receive(steps, place_, tensor, MPI_ANY_SOURCE, check_message("recv", tensors, tag));
  return submit_message("recv", OpType::RECVANYSOURCE, tensors, std::move(steps));
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  Steps steps;
  add_barrier(steps, place_);
  return submit("barrier", OpType::BARRIER, {}, std::move(steps), options.timeout);
}

PlacePtr make_place(Engine& engine, const std::vector<int>& members, int rank, core::Deadline deadline) {
  auto place = std::make_shared<Place>(engine);
  place->rank = rank;
  place->size = static_cast<int>(members.size());
  place->lane = std::make_shared<Lane>();
  engine.run(
      [members, place] {
        MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
        check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
        check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group),
              "MPI_Group_incl");
        check(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &place->collectives), "MPI_Comm_create_group");
        check(MPI_Comm_dup(place->collectives, &place->messages), "MPI_Comm_dup");
        for (const MPI_Comm comm : {place->collectives, place->messages}) {
          MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
        }
        MPI_Group_free(&group);
        MPI_Group_free(&world);
      },
      deadline, "the other ranks of a group to make its communicator");
  return place;
}

}  // namespace cohort::comm::mpi

// What load.cpp finds in this library.
extern "C" {

__attribute__((visibility("default"))) void cohort_mpi_start(cohort::core::Deadline deadline,
                                                             cohort::comm::mpi::Process& process) {
  const auto& engine = cohort::comm::mpi::Engine::start(deadline);
  process = {.job = engine.job(), .rank = engine.rank(), .size = engine.size()};
}

__attribute__((visibility("default"))) void cohort_make_mpi(const cohort::comm::BackendOptions& options,
                                                            const std::vector<int>& members,
                                                            cohort::core::Deadline deadline,
                                                            cohort::comm::MadeBackend& made) {
  using namespace cohort::comm::mpi;
  Engine& engine = Engine::start(deadline);
  made.backend = c10::make_intrusive<MpiBackend>(engine, make_place(engine, members, options.rank, deadline),
                                                 options.timeout);
  made.type = c10d::ProcessGroup::BackendType::MPI;
}
}
