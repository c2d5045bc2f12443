// The calls that an agent makes. Each has a number of the agent's own, and ends once: by its answer, its
// deadline, or the end of its worker. Whoever takes it out of CallTables::pending ends it.
//
// A thread that waits for an answer first reads for itself what comes from the worker
// (net::Peer::poll_until()): waking a thread costs more than a short call.
//
// Within a context of distributed autograd a call is recorded: arguments travel without their graph,
// and results get a history by which gradients travel back as another call (kBackwardPart). A call that
// passes its deadline fails here at once; kCancel then asks the worker to stop its handler.
//
// Calls that have an order are sent in it (MessageSender). The worker that is called has them run in the
// order in which they come (Note [Order of calls], call_server.cpp). So the order needs no numbers, and a
// call that is never sent leaves no gap.
//
// Always: a call of a context that is not sent is taken back from the context, and a call that failed has no
// part in a backward.
#include "cohort/rpc/internal/agent/call_client.h"

#include <atomic>
#include <functional>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/caller_state.h"
#include "cohort/rpc/internal/context_scope.h"

namespace cohort::rpc {
namespace {

using std::chrono::milliseconds;

// What the handler takes over from this thread. Calls of the module itself are the same from anywhere, and
// take no seed.
CallerState state_for(std::string_view function) {
  const bool is_own = function == kBackwardPart || function == kFetch || function == kAwait;
  return is_own ? CallerState() : CallerState::of_next_call();
}

}  // namespace

std::shared_ptr<RecordedCall> CallClient::record(ContextScope& scope, const ContextCall& in_context,
                                                 Encoded& arguments, Callee callee,
                                                 std::optional<RecordedPlace>& place) {
  try {
    std::shared_ptr<RecordedCall> recorded = scope.record(arguments, std::move(callee));
    place = scope.next_place();
    return recorded;
  } catch (...) {  // it was counted, and is not sent
    sender_.send_effects(core_.contexts.cancel_call(in_context));
    throw;
  }
}

base::Future<Encoded> CallClient::call(const Target& target, const char* function, Encoded arguments) {
  const BackwardScope* const backward = BackwardScope::current();
  if (backward == nullptr) return begin(target, function, std::move(arguments)).result;
  if (std::exception_ptr error = backward->error()) {
    base::Promise<Encoded> none("a call of a backward that has failed");
    none.set_error(std::move(error));
    return none.future();
  }
  const BegunCall call = begin(target, function, std::move(arguments));
  backward->on_failure_until(call.result, giving_up(call.id));
  return call.result;
}

CallClient::BegunCall CallClient::begin(const Target& target, const char* function, Encoded arguments) {
  core_.references->check_own(arguments.references);
  if (std::string_view(function) != kAwait) References::mark_used(arguments.references);
  const milliseconds timeout = target.timeout.value_or(core_.timeout.load());
  const base::Deadline deadline = deadline_of(timeout).sooner(remaining_deadline());
  PendingCall pending("the result of a remote call", helper_of(target.worker));
  pending.worker = target.worker;
  pending.function = function;
  pending.timeout = timeout;
  pending.begun = base::Deadline::Clock::now();
  base::Future<Encoded> future = pending.promise.future();
  const KnownWorker* worker = nullptr;
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(tables_.mutex);
    worker = &tables_.workers.find(target.worker);
    worker->check_function(function);
    id = tables_.pending.next_number();
    pending.statistics = &tables_.statistics.count_made(function, pending.begun);
  }
  ContextScope* const scope = ContextScope::recording(core_.contexts.mark());
  const std::optional<ContextCall> in_context =
      scope == nullptr ? std::nullopt : core_.contexts.begin_call(*scope->context(), worker->info.id);
  std::optional<RecordedPlace> place;
  if (in_context) {
    pending.context = scope->context();
    pending.attached.emplace("the answer to a call of a context", helper_of(target.worker));
    const base::Future<void> answer = pending.attached->future();
    pending.recorded = record(*scope, *in_context, arguments,
                              {gradient_sender(target.worker, id, pending.context), answer,
                               answer_or_failure(target.worker, answer, pending.context)},
                              place);
  }
  std::string down;
  {
    const std::lock_guard lock(tables_.mutex);
    if (tables_.shutdown.is_stopped()) {
      throw UsageError("rpc.call", pending.describe(id) + ": this agent has been stopped");
    }
    // An unknown worker or function is the program's fault and throws. A worker that died is an event of the
    // run, so the future fails.
    down = worker->down;
    if (down.empty()) {
      if (!deadline.is_never()) {
        pending.timer = core_.timers->add(deadline.end(), [self = core_.share_weakly(this), id] {
          if (const auto client = self.lock()) client->expire(id);
        });
      }
      tables_.pending.add(id, std::move(pending));
      tables_.shutdown.count_sent(worker->info.id);
    }
  }
  if (!down.empty()) {
    forget(in_context, pending.recorded);
    pending.fail(std::make_exception_ptr(PeerError("rpc.call", pending.describe(id) + ": " + down)));
    return {id, std::move(future)};
  }
  Writer out = begin_call_message(MessageKind::kCall, id, deadline);
  out.text(function);
  encode(out, target.channel);
  encode(out, place);
  encode(out, state_for(function));
  out.append(std::move(arguments));
  sender_.send_when_resolved(
      target.worker, out.take(),
      [self = core_.share(this), id, worker = target.worker, in_context](const std::exception_ptr& error) {
        self->count_unsent(worker);
        self->forget(in_context, nullptr);
        self->fail(id, error);
      },
      // Not once its caller has given up.
      [self = core_.share(this), id, worker = target.worker, in_context] {
        {
          const std::lock_guard lock(self->tables_.mutex);
          if (self->tables_.pending.find(id) != nullptr) return true;
        }
        self->count_unsent(worker);
        self->forget(in_context, nullptr);
        return false;
      },
      target.channel);
  core_.trace_counters();
  return {id, std::move(future)};
}

std::shared_ptr<Reference> CallClient::make(const Target& target, const char* function, Encoded arguments,
                                            const std::string& asked_at) {
  core_.references->check_own(arguments.references);
  if (const BackwardScope* const backward = BackwardScope::current()) {
    if (std::exception_ptr error = backward->error()) {
      return make_lost(target.worker, base::concat(asked_at, " by ", function), std::move(error));
    }
  }
  References::mark_used(arguments.references);
  WorkerInfo owner;
  std::uint64_t id = 0;
  {
    const std::lock_guard lock(tables_.mutex);
    const KnownWorker& worker = tables_.workers.find(target.worker);
    worker.check_function(function);
    if (tables_.shutdown.is_stopped()) {
      throw UsageError("rpc.call",
                       base::concat(function, " on ", target.worker, ": this agent has been stopped"));
    }
    owner = worker.info;
    id = tables_.pending.next_number();
    tables_.statistics.count_made(base::Deadline::Clock::now());
  }
  const MakeTrace trace(function, core_.self.name, target.worker, id);
  ContextScope* const scope = ContextScope::recording(core_.contexts.mark());
  const std::optional<ContextCall> in_context =
      scope == nullptr ? std::nullopt : core_.contexts.begin_call(*scope->context(), owner.id);
  std::optional<RecordedPlace> place;
  std::shared_ptr<RecordedCall> recorded;
  const auto is_used = std::make_shared<std::atomic<bool>>(false);
  if (in_context) {
    recorded = record(*scope, *in_context, arguments,
                      callee_of_object(target.worker, id, scope->context(), is_used), place);
    recorded->make_late();
  }
  const std::shared_ptr<Reference> reference =
      core_.references->create(owner, asked_at + " by " + function, is_used);
  const WireReference wire = core_.references->describe(*reference);
  Writer out =
      begin_call_message(MessageKind::kMake, id, deadline_of(target.timeout.value_or(milliseconds(0))));
  out.text(function);
  out.number(wire.object.number);
  out.number(wire.fork.number);
  out.text(asked_at);
  encode(out, target.channel);
  encode(out, place);
  encode(out, state_for(function));
  out.append(std::move(arguments));
  const UnsentMessage unsent(tables_.num_unsent);
  std::string down;
  bool is_leaving = false;
  {
    const std::lock_guard lock(tables_.mutex);
    const KnownWorker& worker = tables_.workers.find(target.worker);
    down = worker.down;
    is_leaving = worker.is_leaving;
    if (down.empty()) tables_.shutdown.count_sent(owner.id);
  }
  if (!down.empty()) {
    forget(in_context, recorded);
    // A worker that leaves has been told how many calls come. The references to one that is gone are lost as
    // they are.
    if (is_leaving) {
      core_.references->mark_lost(*reference, std::make_exception_ptr(PeerError("rpc.remote", down)));
    }
    return reference;
  }
  sender_.send_when_resolved(
      target.worker, out.take(),
      [self = core_.share(this), worker = target.worker, reference, in_context, recorded,
       unsent](const std::exception_ptr& error) {
        self->count_unsent(worker);
        self->forget(in_context, recorded);
        self->core_.references->mark_lost(*reference, error);
      },
      nullptr, target.channel);
  return reference;
}

// The owner is not asked.
std::shared_ptr<Reference> CallClient::make_lost(const std::string& worker, std::string made_at,
                                                 std::exception_ptr error) {
  WorkerInfo owner;
  {
    const std::lock_guard lock(tables_.mutex);
    owner = tables_.workers.find(worker).info;
  }
  std::shared_ptr<Reference> reference = core_.references->create(owner, std::move(made_at));
  core_.references->mark_lost(*reference, std::move(error));
  return reference;
}

// A call was made, and will never be sent.
void CallClient::count_unsent(const std::string& worker) {
  const std::lock_guard lock(tables_.mutex);
  tables_.shutdown.count_unsent(tables_.workers.id_of(worker));
}

// The same, within a context: the call has no part in a backward.
void CallClient::forget(const std::optional<ContextCall>& in_context,
                        const std::shared_ptr<RecordedCall>& recorded) {
  if (in_context) sender_.send_effects(core_.contexts.cancel_call(*in_context));
  if (recorded != nullptr) core_.free_later(recorded->forget());
}

// The owner of an object has the gradients of its users. Where the owner is gone, nobody can tell an object
// without gradients from one whose gradients are lost. But one that was never fetched and never passed on has
// none. Its function may have handed on other objects: then their gradients are untaken in the end, and the
// error names this worker.
Callee CallClient::callee_of_object(const std::string& worker, std::uint64_t id,
                                    const std::weak_ptr<ContextState>& context,
                                    std::shared_ptr<const std::atomic<bool>> is_used) {
  return {[self = core_.share_weakly(this), worker, context, is_used = std::move(is_used),
           send = gradient_sender(worker, id, context)](const std::vector<at::Tensor>& gradients) {
    const auto client = self.lock();
    const auto known = context.lock();
    if (client == nullptr || known == nullptr || is_used->load() || !client->is_gone(worker)) {
      return send(gradients);
    }
    known->add_untaken(known->current_backward().number, {.lost_worker = worker});
    base::Promise<Encoded> none("the gradients of an object that nobody used");
    none.run([] { return encode_gradients({}); });
    return none.future();
  }};
}

bool CallClient::is_gone(const std::string& worker) const {
  const std::lock_guard lock(tables_.mutex);
  const KnownWorker* const known = tables_.workers.find_if_known(worker);
  return known == nullptr || known->is_gone();
}

base::WaitHelper CallClient::helper_of(const std::string& worker) {
  std::shared_ptr<net::Peer> peer;
  {
    const std::lock_guard lock(tables_.mutex);
    const KnownWorker* const known = tables_.workers.find_if_known(worker);
    if (known == nullptr) return nullptr;
    peer = known->peer;
  }
  return [self = core_.share_weakly(this), peer](const std::function<bool()>& is_done) {
    if (peer != nullptr) peer->poll_until(is_done);
    if (is_done()) return;
    if (const auto client = self.lock()) client->core_.node->will_wait();
  };
}

// A call that had its deadline is no longer known, so anybody may answer it: nobody takes the answer.
void CallClient::check_answer(const std::string& from, std::uint64_t id) const {
  const std::lock_guard lock(tables_.mutex);
  const PendingCall* const call = tables_.pending.find(id);
  if (call == nullptr || call->worker == from) return;
  throw CommError("rpc.receive", base::concat(from, " has answered ", call->describe(id)),
                  "the same program on all workers");
}

void CallClient::on_result(std::uint64_t id, Encoded result, const References::List& references) {
  if (references.empty()) return finish(id, std::move(result), nullptr);
  core_.references->when_resolved(references, [self = core_.share(this), id, result = std::move(result)] {
    self->finish(id, result, nullptr);
  });
}

void CallClient::on_error(std::uint64_t id, const RemoteException& exception) {
  std::string where;
  {
    const std::lock_guard lock(tables_.mutex);
    const PendingCall* const call = tables_.pending.find(id);
    if (call == nullptr) return;
    where = call->describe(id);
  }
  fail(id, error_of_remote(exception, where));
}

void CallClient::finish(std::uint64_t id, Encoded result, const std::exception_ptr& error) {
  PendingCalls::Node call;
  const auto now = base::Deadline::Clock::now();
  {
    const std::lock_guard lock(tables_.mutex);
    call = tables_.pending.take(id);
    if (call.empty()) return;  // it had its deadline
    const PendingCall& ended = call.mapped();
    tables_.statistics.count_end(*ended.statistics, now - ended.begun, error != nullptr);
  }
  core_.timers->remove(call.mapped().timer);
  PendingCall& pending = call.mapped();
  trace_.add(pending.function, pending.worker, id, pending.begun);
  std::shared_ptr<void> left;  // of a recorded call
  if (error) {
    if (pending.recorded != nullptr) left = pending.recorded->forget();
    pending.fail(error);
  } else {
    pending.promise.run([&] {
      if (pending.recorded != nullptr) attach(pending, result);
      return std::move(result);
    });
  }
  {
    const std::lock_guard lock(tables_.mutex);
    tables_.pending.on_finished();
  }
  call = {};
  core_.trace_counters();
  core_.free_later(std::move(left));  // this is the node's thread, as a rule: a graph is freed elsewhere
}

// Gives the results of a recorded call their history; none where the context has ended meanwhile.
void CallClient::attach(PendingCall& call, Encoded& result) {
  Reader in(result);
  const bool is_late = in.number<bool>();
  result = in.rest();
  const std::shared_ptr<ContextState> context = call.context.lock();
  if (context == nullptr || context->has_ended()) {
    for (at::Tensor& tensor : result.tensors) tensor = tensor.detach();
  } else {
    call.recorded->attach(result, is_late);
  }
  call.attached->set();
}

// For a backward that waits for a call which its program has not waited for.
std::function<base::Future<void>()> CallClient::answer_or_failure(
    const std::string& worker, const base::Future<void>& answer, const std::weak_ptr<ContextState>& context) {
  return [self = core_.share_weakly(this), worker, answer, context] {
    const auto client = self.lock();
    const auto known = context.lock();
    if (client == nullptr || known == nullptr || answer.ready()) return answer;
    const auto either =
        std::make_shared<base::Promise<void>>("the answer to a late call", client->helper_of(worker));
    BackwardFailures::on_failure_until(answer, known->failures(), known->current_backward().number,
                                       [either](const std::exception_ptr& /*error*/) { either->try_set(); });
    answer.on_ready([either, answer] {
      std::exception_ptr error;
      try {
        base::Future<void>(answer).get(base::Deadline::never());
      } catch (...) {
        error = std::current_exception();
      }
      either->try_set_error(error);
    });
    return either->future();
  };
}

SendGradients CallClient::gradient_sender(const std::string& worker, std::uint64_t id,
                                          const std::weak_ptr<ContextState>& context) {
  return [self = core_.share_weakly(this), worker, id, context](const std::vector<at::Tensor>& gradients) {
    const auto client = self.lock();
    const auto known = context.lock();
    if (client == nullptr || known == nullptr) {
      throw UsageError("rpc.backward", "the context of a call has ended, or its agent has");
    }
    return client->send_gradients(worker, id, known, gradients);
  };
}

base::Future<Encoded> CallClient::send_gradients(const std::string& worker, std::uint64_t id,
                                                 const std::shared_ptr<ContextState>& context,
                                                 const std::vector<at::Tensor>& gradients) {
  const ContextState::Backward backward = context->current_backward();
  Writer out;
  encode(out, context->id());
  out.number(id);
  out.number(backward.number);
  out.number(backward.keep_graph);
  out.append(encode_gradients(gradients));
  const BegunCall call = begin(Target(worker), kBackwardPart, out.take());
  BackwardFailures::on_failure_until(call.result, context->failures(), backward.number, giving_up(call.id));
  const auto of_arguments =
      std::make_shared<base::Promise<Encoded>>("the gradients of a call's arguments", helper_of(worker));
  call.result.on_ready([answer = call.result, of_arguments, number = backward.number,
                        context = std::weak_ptr(context)]() mutable {
    const auto known = context.lock();
    of_arguments->run([&] {
      try {
        const Encoded encoded = answer.get(base::Deadline::never());
        Reader in(encoded);
        const auto untaken = decode<UntakenGradients>(in);
        if (known != nullptr) known->add_untaken(number, untaken);
        return in.rest();
      } catch (...) {
        if (known != nullptr) known->fail(number, std::current_exception());
        throw;
      }
    });
  });
  return of_arguments->future();
}

void CallClient::expire(std::uint64_t id) {
  std::string text;
  {
    const std::lock_guard lock(tables_.mutex);
    const PendingCall* const call = tables_.pending.find(id);
    if (call == nullptr) return;
    text = base::concat(call->describe(id), ": no answer within ", call->timeout.count(),
                        " ms, or what was left of the call that it belongs to");
  }
  give_up(id, std::make_exception_ptr(TimeoutError("rpc.call", text)));
}

BackwardFailures::OnFailure CallClient::giving_up(std::uint64_t id) {
  return [self = core_.share_weakly(this), id](const std::exception_ptr& error) {
    if (const auto client = self.lock()) client->give_up(id, error);
  };
}

// A call that is not sent yet needs no kCancel: it does not go. If it goes at this moment, no time is left in
// it (MessageSender::send()). Nor does one need it that waits in module net, whose place another message
// takes: Note [Calls given up while they wait].
void CallClient::give_up(std::uint64_t id, const std::exception_ptr& error) {
  std::string worker;
  std::uint64_t sequence = 0;
  QueuedCall queued;
  {
    const std::lock_guard lock(tables_.mutex);
    const PendingCall* const call = tables_.pending.find(id);
    if (call == nullptr) return;
    worker = call->worker;
    sequence = call->sequence;
    queued = tables_.pending.take_queued(id);
  }
  fail(id, error);
  if (sequence == 0 || queued.give_up()) return;
  Writer out = begin_message(MessageKind::kCancel, id);
  out.number(sequence);
  encode(out, describe_exception(error));
  sender_.send(worker, out.take());
}

}  // namespace cohort::rpc
