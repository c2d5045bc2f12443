// The calls that an agent answers. Messages come on the node's thread, which must not wait: take() decodes and
// dispatches, and the pool runs the handler. A call stands in `running_` until its answer is on its way. A
// caller that gave up or is gone takes it out, and asks the handler to stop; its answer is dropped then. A handler
// that is quick as a rule runs on the node's thread (agent_threads.cpp). A call that waits for the window comes after
// its kCancel, which is remembered, so that its handler does not begin. A call
// made by remote() is no caller's alone, so it continues when its caller is gone: others may hold its result.
// References that came as arguments may have to wait for their owners before the handler begins.
//
// Note [Order of calls]: calls of one caller and one channel come in the order in which they were made.
// `handlers_` has each wait until the handler before it has answered: also one that its caller has given
// up, as two handlers of a channel never run at a time. A call that waits keeps its place while the owners
// of its references are asked, and its room in the caller's window. So the window bounds the memory of
// calls that wait. None of them can take the room of an earlier one of its channel, for that one has come
// before.
#include <ATen/core/grad_mode.h>

#include <limits>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/agent/agent_state.h"
#include "cohort/rpc/internal/owner_optimizer.h"
#include "cohort/rpc/internal/recorded_part.h"
#include "cohort/rpc/internal/telemetry/run_timer.h"
#include "cohort/rpc/internal/wire.h"

namespace cohort::rpc {

using std::chrono::nanoseconds;

namespace {

thread_local AgentState* of_this_handler = nullptr;

// The agent whose handler this thread runs, while it lives.
class HandlerScope {
 public:
  explicit HandlerScope(AgentState* agent) : outer_(std::exchange(of_this_handler, agent)) {}
  ~HandlerScope() { of_this_handler = outer_; }
  HandlerScope(const HandlerScope&) = delete;
  HandlerScope& operator=(const HandlerScope&) = delete;

 private:
  AgentState* const outer_;
};

// A message may come on a thread that waits for an answer: what that thread does is nothing to the message.
class DeliveryScope {
  const NoCallerScope caller_;
  const HandlerScope handler_{nullptr};
};

}  // namespace

void AgentState::on_down(const std::shared_ptr<net::Peer>& peer, const std::string& why) {
  const DeliveryScope delivery;
  {
    const std::lock_guard lock(mutex_);
    if (early_events_.keep_down(peer, why)) return;
  }
  end_worker(peer, why);
}

void AgentState::take(const std::string& from, net::Message message) {
  const DeliveryScope delivery;
  bool is_call = false;
  try {
    std::shared_ptr<void> credit = std::move(message.credit);
    auto [encoded, wires] = to_encoded(message);
    Reader in(&encoded);
    const auto kind = static_cast<MessageKind>(in.number<std::uint8_t>());
    const auto id = in.number<std::uint64_t>();
    is_call = kind == MessageKind::kCall || kind == MessageKind::kMake;
    encoded.references = receive_references(wires, from);
    if (kind == MessageKind::kResult || kind == MessageKind::kError) check_answer(from, id);
    switch (kind) {
      case MessageKind::kCall:
        return on_call(from, id, in, std::move(credit));
      case MessageKind::kMake:
        return on_make(from, id, in, std::move(credit));
      case MessageKind::kResult: {
        if (encoded.references.empty()) return finish(id, in.rest(), nullptr);
        const References::List references = encoded.references;
        return references_->when_resolved(references, [self = shared_from_this(), id, result = in.rest()] {
          self->finish(id, result, nullptr);
        });
      }
      case MessageKind::kError:
        return on_error(id, decode<RemoteException>(in));
      case MessageKind::kCancel:
        return on_cancel_message({from, id});
      case MessageKind::kReference:
        return on_reference(from, in);
      case MessageKind::kContext:
        return on_context_message(from, in);
      case MessageKind::kLeaving:
        return on_leaving(from, decode<std::optional<IdleReport>>(in));
    }
    throw CommError("rpc.receive", base::concat("a message is of kind ", static_cast<int>(kind)));
  } catch (const CommError& error) {
    // Whoever sent it has the secret, so it is another program. Its call ends at its deadline.
    base::log_error(base::concat("a message of ", from, " is dropped: ", base::message_of(error)));
  } catch (const std::exception& error) {
    base::log_error(base::concat("a message of ", from, " cannot be handled: ", base::message_of(error)));
  }
  if (is_call) count_received(from);  // shutdown() is not to wait for it
}

void AgentState::count_received(const std::string& caller) {
  const std::lock_guard lock(mutex_);
  shutdown_.count_received(workers_.id_of(caller));
}

References::List AgentState::receive_references(const std::vector<WireReference>& wires,
                                                const std::string& from) {
  if (wires.empty()) return {};
  for (const WireReference& wire : wires) worker(wire.owner);  // throws for an unknown one
  return references_->receive(wires, id_of(from));
}

void AgentState::on_reference(const std::string& from, Reader& in) {
  const ReferenceMessage message = read_reference_message(in);
  in.finish();
  references_->on_message(id_of(from), message);
}

void AgentState::on_context_message(const std::string& from, Reader& in) {
  const ContextMessage message = read_context_message(in);
  in.finish();
  apply(contexts_.on_message(id_of(from), message));
}

// Also of a call whose handler will not begin: the end of its context waits for it.
ContextProtocol::CopyId AgentState::count_in_context(const std::string& caller,
                                                     const std::optional<RecordedPlace>& place) {
  if (!place) return ContextProtocol::kNoCopy;
  worker(place->context.creator);  // throws for an unknown one
  return contexts_.on_call(id_of(caller), place->context);
}

void AgentState::on_call(const std::string& caller, std::uint64_t id, Reader& in,
                         std::shared_ptr<void> credit) {
  Job job;
  job.key = {caller, id};
  job.function = in.text();
  const auto left = in.number<std::int64_t>();
  job.channel = decode<std::optional<std::string>>(in);
  job.place = decode<std::optional<RecordedPlace>>(in);
  job.state = decode<CallerState>(in);
  job.copy = count_in_context(caller, job.place);
  begin(std::move(job), left, in.rest(), std::move(credit));
}

void AgentState::on_make(const std::string& caller, std::uint64_t id, Reader& in,
                         std::shared_ptr<void> credit) {
  Job job;
  job.key = {caller, id};
  job.function = in.text();
  const auto left = in.number<std::int64_t>();
  WireReference asked;
  asked.owner = self_.id;
  asked.object.creator = asked.fork.maker = id_of(caller);
  asked.object.number = in.number<std::uint64_t>();
  asked.fork.number = in.number<std::uint64_t>();
  const std::string line = in.text();
  job.channel = decode<std::optional<std::string>>(in);
  job.place = decode<std::optional<RecordedPlace>>(in);
  job.state = decode<CallerState>(in);
  job.copy = count_in_context(caller, job.place);
  job.result = references_->make(asked, asked.fork.maker, base::concat(line, " by ", job.function));
  begin(std::move(job), left, in.rest(), std::move(credit));
}

void AgentState::begin(Job job, std::int64_t nanoseconds_left, Encoded arguments,
                       std::shared_ptr<void> credit) {
  job.call.caller = job.key.first;
  if (nanoseconds_left != std::numeric_limits<std::int64_t>::max()) {
    job.call.deadline = base::Deadline(nanoseconds(nanoseconds_left));
  }
  const auto now = base::Deadline::Clock::now();
  {
    const std::lock_guard lock(mutex_);
    // Together with running_, so that no report has one of both. Last, as take() counts what throws.
    const std::int32_t caller = workers_.id_of(job.key.first);
    if (job.result == nullptr && running_.take_cancelled(job.key)) return shutdown_.count_received(caller);
    RunningCalls::Call running;
    running.is_kept = job.result != nullptr;
    job.call.stop = running.stop.get_token();
    if (!job.call.deadline.is_never()) {
      std::function<void()> expire = [self = weak_from_this(), key = job.key] {
        if (const auto state = self.lock()) state->on_cancel(key);
      };
      if (job.result != nullptr) {
        expire = [self = weak_from_this(), job] {
          if (const auto state = self.lock()) state->expire_object(job);
        };
      }
      running.timer = timers_->add(job.call.deadline.end(), std::move(expire));
    }
    running_.add(job.key, std::move(running));
    statistics_.count_handled(now);
    threads_.on_queued();
    shutdown_.count_received(caller);
  }
  if (!job.channel) return start(job, std::move(arguments), std::move(credit));
  const base::KeyedAsyncMutex::Key key(job.key.first, *job.channel);
  handlers_->lock(key,
                  [self = shared_from_this(), job = std::move(job), arguments = std::move(arguments),
                   credit = std::move(credit)](std::shared_ptr<base::KeyedAsyncMutex::Lock> lock) mutable {
                    job.channel_lock = std::move(lock);
                    self->start(job, std::move(arguments), std::move(credit));
                  });
}

// A handler that may begin.
void AgentState::start(const Job& job, Encoded arguments, std::shared_ptr<void> credit) {
  if (arguments.references.empty()) {
    if (may_run_here(job.function)) {
      credit.reset();
      return run_here(job, std::move(arguments));
    }
    return run_on_pool(job, std::move(arguments), std::move(credit));
  }
  const References::List references = arguments.references;
  // What their owners answer needs no room of the window.
  references_->when_resolved(references, [self = shared_from_this(), job, arguments = std::move(arguments),
                                          credit = std::move(credit)]() mutable {
    self->run_on_pool(job, std::move(arguments), std::move(credit));
  });
}

namespace {

void answer_backward_part(const Encoded& arguments, const Reply& reply) {
  Encoded gradients;
  std::exception_ptr error;
  try {
    gradients = AgentState::of_handler()->backward_part(arguments);
  } catch (...) {
    error = std::current_exception();
  }
  reply(std::move(gradients), error);
}

void invoke_and_keep(const RemoteFunction& function, Encoded arguments, const Keep& keep) {
  if (!function.invoke_and_keep) throw UsageError("rpc.remote", "the function has no result to keep");
  function.invoke_and_keep(std::move(arguments), keep);
}

// The next call of the channel begins.
void unlock_channel(const std::shared_ptr<base::KeyedAsyncMutex::Lock>& lock) {
  if (lock != nullptr) lock->unlock();
}

// Calls `fn`, and sets `error` to what it throws; where there is one, does not call it.
template <typename Fn>
void run_unless_failed(std::exception_ptr& error, const Fn& fn) {
  if (error) return;
  try {
    fn();
  } catch (...) {
    error = std::current_exception();
  }
}

[[maybe_unused]] const bool is_registered = add_function_at_load(
    kBackwardPart, {"(gradients) -> gradients", false, answer_backward_part, nullptr}, __FILE__, __LINE__);

}  // namespace

AgentState* AgentState::of_handler() {
  return of_this_handler;
}

void AgentState::run(const Job& job, Encoded arguments) {
  const auto self = shared_from_this();
  const HandlerThreads::OnThread on_thread(threads_);
  if (job.call.stop.stop_requested()) {  // nobody waits any more: it does not begin
    if (job.result == nullptr) return unlock_channel(job.channel_lock);
    return keep(job, {},
                std::make_exception_ptr(TimeoutError("rpc.remote", job.function + " did not begin in time")));
  }
  const RunTimer timer(job.key);
  try {
    const RemoteFunction& found = find_function(job.function);
    const CallScope scope(job.call);
    const HandlerScope agent(this);
    const CallerStateScope state(job.state);
    const HandlerTrace trace(job.function, job.key.first, job.key.second, job.place.has_value());
    if (job.function == kFetch) {
      run_fetch(job, arguments, found);
    } else if (job.place) {
      run_in_context(job, std::move(arguments), found);
    } else if (job.result == nullptr) {
      found.invoke(std::move(arguments), [self, key = job.key, lock = job.channel_lock](
                                             Encoded result, const std::exception_ptr& error) {
        self->answer(key, std::move(result), error);
        unlock_channel(lock);
      });
    } else {
      invoke_and_keep(found, std::move(arguments),
                      [self, job](ObjectValue value, const std::exception_ptr& error) {
                        self->keep(job, std::move(value), error);
                      });
    }
  } catch (...) {
    fail_job(job, std::current_exception());
  }
  threads_.note_run(job.function, timer.elapsed());
}

// The value of an object. A parameter is copied, since an optimizer may step while it is sent.
void AgentState::run_fetch(const Job& job, const Encoded& arguments, const RemoteFunction& function) {
  const std::shared_ptr<ContextState> context =
      job.place ? contexts_.get(job.copy, job.place->context) : nullptr;
  function.invoke(
      arguments, [self = shared_from_this(), job, context](Encoded value, std::exception_ptr error) {
        run_unless_failed(error, [&] {
          std::vector<at::Tensor*> parameters;
          for (at::Tensor& tensor : value.tensors) {
            if (!tensor.requires_grad() || !tensor.is_leaf()) continue;
            if (context == nullptr || !context->is_value(tensor)) parameters.push_back(&tensor);
          }
          if (context != nullptr) {
            context->add_fetch({self->id_of(job.key.first), job.key.second}, job.place->path, value);
          }
          const at::NoGradGuard no_grad;
          const std::lock_guard lock(parameters_mutex());
          for (at::Tensor* const parameter : parameters) *parameter = parameter->clone().requires_grad_();
        });
        self->answer(job.key, std::move(value), error, job.place ? std::optional(false) : std::nullopt);
        unlock_channel(job.channel_lock);
      });
}

// The handler's part of the graph ends with its answer.
void AgentState::run_in_context(const Job& job, Encoded arguments, const RemoteFunction& function) {
  const auto self = shared_from_this();
  const std::shared_ptr<ContextState> context = contexts_.get(job.copy, job.place->context);
  const ContextState::PartKey key(id_of(job.key.first), job.key.second);
  const auto part =
      std::make_shared<RecordedPart>(context, key, job.place->path, arguments, function.is_async);
  if (job.result == nullptr) {
    return function.invoke(std::move(arguments), [self, job, part](Encoded result, std::exception_ptr error) {
      bool is_late = false;
      run_unless_failed(error, [&] { is_late = part->end(result); });
      self->answer(job.key, std::move(result), error, is_late);
      unlock_channel(job.channel_lock);
    });
  }
  invoke_and_keep(function, std::move(arguments),
                  [self, job, part](ObjectValue value, std::exception_ptr error) {
                    run_unless_failed(error, [&] { part->end(value); });
                    self->keep(job, std::move(value), error);
                  });
}

Encoded AgentState::backward_part(const Encoded& arguments) {
  Reader in(arguments);
  const auto context = decode<ContextId>(in);
  const auto call = in.number<std::uint64_t>();
  ContextState::Backward backward;
  backward.number = in.number<std::uint64_t>();
  backward.keep_graph = in.number<bool>();
  const std::vector<at::Tensor> gradients = decode_gradients(in);
  in.finish();
  trace_gradient(current_call()->caller, call, !backward.keep_graph);
  const std::shared_ptr<ContextState> known =
      gradients.empty() ? contexts_.find_if_here(context) : contexts_.find(context);
  if (known == nullptr) return encode_gradients({});  // the call that was to make the object did not run here
  return encode_gradients(known->backward_part({id_of(current_call()->caller), call}, backward, gradients));
}

void AgentState::fail_job(const Job& job, const std::exception_ptr& error) {
  if (job.result != nullptr) return keep(job, {}, error);
  answer(job.key, {}, error);
  unlock_channel(job.channel_lock);
}

// Takes the call out, if somebody still waits for it, and returns what asks its handler to stop.
std::optional<std::stop_source> AgentState::end(const RunningKey& key) {
  std::optional<RunningCalls::Call> call;
  {
    const std::lock_guard lock(mutex_);
    call = running_.take(key);
  }
  if (!call) return std::nullopt;
  timers_->remove(call->timer);
  return call->stop;
}

void AgentState::keep(const Job& job, ObjectValue value, const std::exception_ptr& error) {
  RunTimer::end(job.key);
  references_->set_value(*job.result, std::move(value), error);
  end(job.key);
  unlock_channel(job.channel_lock);
}

// `is_late`: of a call within a context.
void AgentState::answer(const RunningKey& key, Encoded result, std::exception_ptr error,
                        std::optional<bool> is_late) {
  RunTimer::end(key);
  if (!end(key)) return;
  {
    const std::lock_guard lock(mutex_);
    if (shutdown_.is_stopped()) return;
  }
  run_unless_failed(error, [&] { references_->check_own(result.references); });
  // Also for a result that cannot travel: the caller learns why.
  const auto send_error = [self = shared_from_this(), key](const std::exception_ptr& thrown) {
    Writer out = begin_message(MessageKind::kError, key.second);
    encode(out, describe_exception(thrown));
    self->send(key.first, out.take());
  };
  if (error) {
    send_error(error);
  } else {
    Writer out = begin_message(MessageKind::kResult, key.second);
    if (is_late) out.number(*is_late);
    out.append(std::move(result));
    send_when_resolved(key.first, out.take(), send_error);
  }
}

// An object that was not made in time has an error in its place, also while its function still runs.
void AgentState::expire_object(const Job& job) {
  references_->set_value(
      *job.result, {},
      std::make_exception_ptr(TimeoutError("rpc.remote", job.function + " was not done in time")));
  on_cancel(job.key);
}

// False where no such call runs.
bool AgentState::on_cancel(const RunningKey& key) {
  std::optional<std::stop_source> stop = end(key);
  if (!stop) return false;
  stop->request_stop();
  return true;
}

void AgentState::on_cancel_message(const RunningKey& key) {
  if (on_cancel(key)) return;
  const std::lock_guard lock(mutex_);
  running_.remember_cancelled(key);
}

}  // namespace cohort::rpc
