// Each call becomes a list of steps for the engine. gather, scatter, all_to_all, and an all_gather into
// separate tensors are exchanges of messages between the ranks. Always: collectives of a group share its
// queue, and messages have none; each kind has a communicator of its own. So a message and a collective that
// are under way together cannot be taken for each other.
#include "cohort/comm/backends/mpi/internal/mpi.h"

#include <ATen/ops/cat.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "cohort/base/error.h"
#include "cohort/comm/internal/backend.h"

namespace cohort::comm::mpi {
namespace {

using std::chrono::milliseconds;

// A part for each rank.
std::vector<Message> messages_of(const std::vector<std::byte*>& parts, std::size_t bytes) {
  std::vector<Message> messages;
  for (std::byte* const part : parts) {
    messages.push_back({.data = {part, bytes}, .peer = static_cast<int>(messages.size())});
  }
  return messages;
}

std::vector<Message> messages_of(const std::vector<Span>& parts) {
  std::vector<Message> messages;
  for (const Span& part : parts) {
    messages.push_back({.data = part, .peer = static_cast<int>(messages.size())});
  }
  return messages;
}

// The parts for output `i`, of each rank, one after the other.
at::Tensor whole_input(const CpuCall& call, std::size_t i, int size) {
  if (call.is_whole()) return call.inputs[i];
  const auto ranks = static_cast<std::size_t>(size);
  Tensors flat;
  for (const at::Tensor& part : std::span(call.inputs).subspan(i * ranks, ranks)) {
    flat.push_back(part.view({-1}));
  }
  return at::cat(flat);
}

}  // namespace

MpiBackend::MpiBackend(Engine& engine, CommunicatorsPtr comms, milliseconds timeout)
    : CpuBackend("mpi", comms->rank, comms->size, timeout), engine_(engine), comms_(std::move(comms)) {
  engine_.set_exit_timeout(timeout);
}

void MpiBackend::check(const CpuCall& call) const {
  if (!call.is_message()) return;
  const CallSite who = caller(call.type);
  TORCH_CHECK(call.peer >= 0 || is_one_message(call.outputs[0]), who,
              " from any rank takes at most 1 GiB, got ", call.outputs[0].nbytes(), " bytes");
  TORCH_CHECK(call.tag >= 0 && call.tag <= engine_.process().largest_tag, who, ": tag is ", call.tag,
              ", expected 0 to ", engine_.process().largest_tag);
}

// Those of the call's collective on tensor `i`, or of its message.
void MpiBackend::add_steps(Steps& steps, const CpuCall& call, std::size_t i) const {
  switch (call.type) {
    case CallType::kAllReduce:
      return add_reduce(steps, comms_, call.outputs[i], call.reductions[i]);
    case CallType::kBroadcast:
      return add_broadcast(steps, comms_, call.outputs[i], call.peer);
    case CallType::kReduce:
      return add_reduce(steps, comms_, call.outputs[i], call.reductions[i], call.peer);
    case CallType::kAllGather: {
      const at::Tensor& input = call.inputs[i];
      if (call.is_whole()) return add_all_gather(steps, comms_, call.outputs[i], input);
      const std::vector<std::byte*> to_all(static_cast<std::size_t>(size_), data_of(input));
      return add_exchange(steps, comms_, messages_of(to_all, input.nbytes()),
                          messages_of(call.output_parts(i, size_), input.nbytes()));
    }
    case CallType::kGather: {
      const Span input = span_of(call.inputs[i]);
      return add_exchange(steps, comms_, {{.data = input, .peer = call.peer}},
                          messages_of(call.output_parts(i, size_), input.bytes));
    }
    case CallType::kScatter: {
      const Span output = span_of(call.outputs[i]);
      return add_exchange(steps, comms_, messages_of(call.input_parts(i, size_), output.bytes),
                          {{.data = output, .peer = call.peer}});
    }
    case CallType::kReduceScatter:
      return add_reduce_scatter(steps, comms_, call.outputs[i], whole_input(call, i, size_),
                                call.reductions[i]);
    case CallType::kAllToAll:
      return add_exchange(steps, comms_, messages_of(call.sent), messages_of(call.received));
    case CallType::kSend:
      return add_send(steps, comms_, call.inputs[i], call.peer, call.tag);
    case CallType::kRecv:
      return add_receive(steps, comms_, call.outputs[i], call.peer < 0 ? MPI_ANY_SOURCE : call.peer,
                         call.tag);
    case CallType::kBarrier:
      return add_barrier(steps, comms_);
  }
}

MpiBackend::WorkPtr MpiBackend::begin(CpuCall&& call) {
  Steps steps;
  for (std::size_t i = 0; i < call.num_collectives(); ++i) add_steps(steps, call, i);
  auto queue = call.is_message() ? nullptr : comms_->queue;
  auto work = c10::make_intrusive<MpiWork>(std::move(call), CallGroup{pg_uid_, rank_, size_},
                                           std::move(steps), std::move(queue));
  engine_.submit(work);
  return work;
}

CommunicatorsPtr make_communicators(Engine& engine, const std::vector<int>& members, int rank,
                                    base::Deadline deadline) {
  auto comms = std::make_shared<Communicators>(engine);
  comms->rank = rank;
  comms->size = static_cast<int>(members.size());
  comms->queue = std::make_shared<OrderedQueue>();
  // On the engine's thread, which alone calls MPI.
  engine.run(
      [members, comms] {
        MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
        check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
        check(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &group),
              "MPI_Group_incl");
        check(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comms->collectives), "MPI_Comm_create_group");
        check(MPI_Comm_dup(comms->collectives, &comms->messages), "MPI_Comm_dup");
        // MPI's own handler would end the job; check() makes an exception of each code instead.
        for (const MPI_Comm comm : {comms->collectives, comms->messages}) {
          MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
        }
        MPI_Group_free(&group);
        MPI_Group_free(&world);
      },
      deadline, "the other ranks of a group to make its communicator");
  return comms;
}

}  // namespace cohort::comm::mpi

// What load.cpp finds in this library.
extern "C" {

__attribute__((visibility("default"))) void cohort_mpi_start(cohort::base::Deadline deadline,
                                                             cohort::comm::mpi::Process& process) {
  process = cohort::comm::mpi::Engine::start(deadline).process();
}

__attribute__((visibility("default"))) void cohort_make_mpi(const cohort::comm::BackendOptions& options,
                                                            const std::vector<int>& members,
                                                            cohort::base::Deadline deadline,
                                                            cohort::comm::BackendInstance& made) {
  using namespace cohort::comm::mpi;
  Engine& engine = Engine::start(deadline);
  made.backend = c10::make_intrusive<MpiBackend>(
      engine, make_communicators(engine, members, options.rank, deadline), options.timeout);
  made.type = c10d::ProcessGroup::BackendType::MPI;
  made.deterministic_rank_order = true;
  made.may_raise_sigpipe = false;
  made.shares_queue = true;
}
}
