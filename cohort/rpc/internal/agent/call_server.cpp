// A call stands in CallTables::running until its answer is on its way. A caller that gave up or is gone takes
// it out, and asks the handler to stop; its answer is dropped then. A call may come after its kCancel, which
// is remembered (CallArrivals), or with no time left, as it has waited for the window: its handler does not
// begin then. A call made by remote() is no caller's alone, so it continues when its caller is gone: others
// may hold its result. References that came as arguments may have to wait for their owners before the handler
// begins.
//
// Note [Order of calls]: calls of one caller and one channel come in the order in which they were made.
// `channels_` has each wait until the handler before it has answered: also one that its caller has given
// up, as two handlers of a channel never run at a time. A call that waits keeps its place while the owners
// of its references are asked, and its room in the caller's window. So the window bounds the memory of
// calls that wait. None of them can take the room of an earlier one of its channel, for that one has come
// before. A call that is given up drops its arguments and its room (WaitingArguments), and keeps its place.
//
// Waking a thread costs more than a short call, so a function whose last runs were quick runs on the node's
// thread. Should it be long this time, nothing else is read meanwhile; so another thread takes the node's
// place: as the function begins to wait for a call of its own, or by a timer, and the function goes to the
// pool for its next runs. One handler at a time may be on the node's thread, or have begun there. With
// AgentOptions::num_threads of 1 none is: a program may count on one handler at a time.
#include "cohort/rpc/internal/agent/call_server.h"

#include <ATen/core/grad_mode.h>

#include <functional>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/rpc/internal/agent/agent_messages.h"
#include "cohort/rpc/internal/agent/handler_scope.h"
#include "cohort/rpc/internal/parameters_mutex.h"
#include "cohort/rpc/internal/recorded_part.h"
#include "cohort/rpc/internal/telemetry/call_trace.h"
#include "cohort/rpc/internal/telemetry/run_timer.h"
#include "cohort/rpc/remote_exception.h"

namespace cohort::rpc {
namespace {

using std::chrono::nanoseconds;

constexpr std::chrono::microseconds kPatience(1'000);  // until another thread takes the node's place

void invoke_and_keep(const RemoteFunction& function, Encoded arguments, const Keep& keep) {
  if (!function.invoke_and_keep) throw UsageError("rpc.remote", "the function has no result to keep");
  function.invoke_and_keep(std::move(arguments), keep);
}

RemoteException no_time_is_left() {
  return {"TimeoutError", "its caller had no answer in time"};
}

std::exception_ptr did_not_begin(const std::string& function) {
  return std::make_exception_ptr(TimeoutError("rpc.remote", function + " did not begin in time"));
}

// The next call of the channel begins.
void unlock_channel(const std::shared_ptr<KeyedAsyncMutex::Lock>& lock) {
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

// CallServer::run_backward() runs it.
[[maybe_unused]] const bool is_registered = add_function_at_load(
    kBackwardPart, {"(gradients) -> gradients, untaken", false, nullptr, nullptr}, __FILE__, __LINE__);

}  // namespace

// What CallClient::send_gradients() sends.
struct CallServer::BackwardCall {
  explicit BackwardCall(const Encoded& arguments) {
    Reader in(arguments);
    context = decode<ContextId>(in);
    call = in.number<std::uint64_t>();
    backward.number = in.number<std::uint64_t>();
    backward.keep_graph = in.number<bool>();
    gradients = decode_gradients(in);
    in.finish();
  }

  ContextId context;
  std::uint64_t call = 0;
  ContextState::Backward backward;
  std::vector<at::Tensor> gradients;
};

// The gradients of the arguments of a call that this agent answered, for those of its results.
Encoded CallServer::backward_part(const std::string& caller, const BackwardCall& asked) const {
  trace_gradient(caller, asked.call, !asked.backward.keep_graph);
  const std::shared_ptr<ContextState> known = asked.gradients.empty()
                                                  ? core_.contexts.find_if_here(asked.context)
                                                  : core_.contexts.find(asked.context);
  std::vector<at::Tensor> of_arguments;  // none where the call that was to make the object did not run here
  UntakenGradients untaken;
  if (known != nullptr) {
    of_arguments = known->backward_part({core_.id_of(caller), asked.call}, asked.backward, asked.gradients);
    untaken = known->take_untaken(asked.backward.number);
  }
  Writer out;
  encode(out, untaken);
  out.append(encode_gradients(of_arguments));
  return out.take();
}

// Also of a call whose handler will not begin: the end of its context waits for it.
ContextProtocol::CopyId CallServer::count_in_context(const std::string& caller,
                                                     const std::optional<RecordedPlace>& place) {
  if (!place) return ContextProtocol::kNoCopy;
  core_.worker(place->context.creator);  // throws for an unknown one
  return core_.contexts.on_call(core_.id_of(caller), place->context);
}

void CallServer::on_call(const std::string& caller, std::uint64_t id, Reader& in,
                         std::shared_ptr<void> credit) {
  Job job;
  job.key = {caller, id};
  const auto left = in.number<std::int64_t>();
  {
    const auto sequence = in.number<std::uint64_t>();
    const std::lock_guard lock(tables_.mutex);
    job.is_cancelled = tables_.running.arrivals_of(caller).add(sequence);
  }
  job.function = in.text();
  job.channel = decode<std::optional<std::string>>(in);
  job.place = decode<std::optional<RecordedPlace>>(in);
  job.state = decode<CallerState>(in);
  job.copy = count_in_context(caller, job.place);
  begin(std::move(job), left, in.rest(), std::move(credit));
}

void CallServer::on_make(const std::string& caller, std::uint64_t id, Reader& in,
                         std::shared_ptr<void> credit) {
  Job job;
  job.key = {caller, id};
  const auto left = in.number<std::int64_t>();
  job.function = in.text();
  WireReference asked;
  asked.owner = core_.self.id;
  asked.object.creator = asked.fork.maker = core_.id_of(caller);
  asked.object.number = in.number<std::uint64_t>();
  asked.fork.number = in.number<std::uint64_t>();
  const std::string line = in.text();
  job.channel = decode<std::optional<std::string>>(in);
  job.place = decode<std::optional<RecordedPlace>>(in);
  job.state = decode<CallerState>(in);
  job.copy = count_in_context(caller, job.place);
  job.result = core_.references->make(asked, asked.fork.maker, base::concat(line, " by ", job.function));
  begin(std::move(job), left, in.rest(), std::move(credit));
}

void CallServer::begin(Job job, std::int64_t nanoseconds_left, Encoded arguments,
                       std::shared_ptr<void> credit) {
  job.call.caller = job.key.first;
  if (nanoseconds_left != kForever) job.call.deadline = base::Deadline(nanoseconds(nanoseconds_left));
  if (job.is_cancelled || nanoseconds_left <= 0) return skip(job);
  job.arguments = std::make_shared<WaitingArguments>(std::move(arguments), std::move(credit));
  const auto now = base::Deadline::Clock::now();
  {
    const std::lock_guard lock(tables_.mutex);  // Note [One mutex]
    // The count is last, as AgentState::take() counts what throws.
    const std::int32_t caller = tables_.workers.id_of(job.key.first);
    RunningCalls::RunningCall running;
    running.function = job.function;
    running.is_kept = job.result != nullptr;
    running.arguments = job.arguments;
    job.call.stop = running.stop.get_token();
    if (job.function == kBackwardPart) {
      running.why_cancelled =
          std::make_shared<RemoteException>(RemoteException{"UsageError", "this agent has been stopped"});
      job.why_cancelled = running.why_cancelled;
    }
    if (!job.call.deadline.is_never()) {
      std::function<void()> expire = [self = core_.share_weakly(this), key = job.key] {
        if (const auto server = self.lock()) server->cancel(key, no_time_is_left());
      };
      if (job.result != nullptr) {
        expire = [self = core_.share_weakly(this), job] {
          if (const auto server = self.lock()) server->expire_object(job);
        };
      }
      running.timer = core_.timers->add(job.call.deadline.end(), std::move(expire));
    }
    tables_.running.add(job.key, std::move(running));
    tables_.statistics.count_handled(now);
    tables_.shutdown.count_received(caller);
  }
  if (!job.channel) return start(job);
  const KeyedAsyncMutex::Key key(job.key.first, *job.channel);
  channels_->lock(key, [self = core_.share(this),
                        job = queue(std::move(job))](std::shared_ptr<KeyedAsyncMutex::Lock> lock) mutable {
    job.channel_lock = std::move(lock);
    self->start(job);
  });
}

// Its caller has given it up, or its time was over before it was sent. The count is last, as in begin().
void CallServer::skip(const Job& job) {
  if (job.result != nullptr) core_.references->set_value(*job.result, {}, did_not_begin(job.function));
  const std::lock_guard lock(tables_.mutex);
  tables_.shutdown.count_received(tables_.workers.id_of(job.key.first));
}

// A handler that may begin.
void CallServer::start(const Job& job) {
  const References::List references = job.arguments->references();
  if (references.empty()) return may_run_here(job.function) ? run_here(job) : run_on_pool(job);
  // What their owners answer needs no room of the window.
  core_.references->when_resolved(
      references, [self = core_.share(this), job = queue(job), references] { self->run_on_pool(job); });
}

// The same job, which counts as one that waits until it begins, or nobody has it any more.
CallServer::Job CallServer::queue(Job job) {
  if (job.queued == nullptr) job.queued = std::make_shared<HandlerThreads::Queued>(core_.share(&threads_));
  return job;
}

void CallServer::run(const Job& job) {
  const auto self = core_.share(this);
  const HandlerThreads::OnThread on_thread(threads_);
  if (job.queued != nullptr) job.queued->begin();
  std::optional<Encoded> waiting = job.arguments->take();
  if (!waiting || job.call.stop.stop_requested()) {  // nobody waits any more: it does not begin
    if (job.result == nullptr) return unlock_channel(job.channel_lock);
    return keep(job, {}, did_not_begin(job.function));
  }
  Encoded arguments = *std::move(waiting);
  const RunTimer timer(job.key);
  try {
    if (job.function == kBackwardPart && waits_for_maker(job, arguments)) return;
    const RemoteFunction& found = find_function(job.function);
    const CallScope scope(job.call);
    const HandlerScope agent(&core_);
    const CallerStateScope state(job.state);
    const HandlerTrace trace(job.function, job.key.first, job.key.second, job.place.has_value());
    if (job.function == kBackwardPart && job.result == nullptr) {
      run_backward(job, BackwardCall(arguments));
    } else if (job.function == kFetch) {
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
  core_.trace_counters();
}

// A part whose caller gives it up, or is gone, belongs to a backward that has failed: Note [Failed
// backwards].
void CallServer::run_backward(const Job& job, const BackwardCall& asked) {
  const std::shared_ptr<ContextState> context = core_.contexts.find_if_here(asked.context);
  const std::stop_callback on_stop(job.call.stop, [&] {
    if (context == nullptr) return;
    RemoteException why;
    {
      const std::lock_guard lock(tables_.mutex);
      why = *job.why_cancelled;
    }
    context->fail(asked.backward.number,
                  error_of_remote(why, base::concat(kBackwardPart, " for ", job.key.first, ", call ",
                                                    shown_number(job.key.second), ", was given up")));
  });
  answer(job.key, backward_part(job.key.first, asked), nullptr);
  unlock_channel(job.channel_lock);
}

// The function of a remote() may hand on objects that it makes before it returns, and its part is there once
// it has returned. So a backward of a call that still runs begins then. No thread waits meanwhile.
bool CallServer::waits_for_maker(const Job& job, const Encoded& arguments) {
  if (!arguments.tensors.empty()) return false;  // gradients of results, so it has returned
  const BackwardCall asked(arguments);
  if (!asked.gradients.empty()) return false;
  Job again = job;
  again.queued = nullptr;
  again.arguments = std::make_shared<WaitingArguments>(arguments, nullptr);
  auto run_again = [self = core_.share_weakly(this), again = std::move(again)] {
    if (const auto server = self.lock()) server->run_on_pool(again);
  };
  const RunningCalls::Key maker{job.key.first, asked.call};
  const std::lock_guard lock(tables_.mutex);
  const std::string function = tables_.running.function_of(maker);
  // Nothing is recorded of one that returns a Future, which may be set long after.
  if (function.empty() || find_function(function).is_async) return false;
  return tables_.running.on_end(maker, std::move(run_again));
}

// The value of an object. A parameter is copied, since an optimizer may step while it is sent.
void CallServer::run_fetch(const Job& job, const Encoded& arguments, const RemoteFunction& function) {
  const std::shared_ptr<ContextState> context =
      job.place ? core_.contexts.get(job.copy, job.place->context) : nullptr;
  function.invoke(
      arguments, [self = core_.share(this), job, context](Encoded value, std::exception_ptr error) {
        run_unless_failed(error, [&] {
          std::vector<at::Tensor*> parameters;
          for (at::Tensor& tensor : value.tensors) {
            if (!tensor.requires_grad() || !tensor.is_leaf()) continue;
            if (context == nullptr || !context->is_value(tensor)) parameters.push_back(&tensor);
          }
          if (context != nullptr) {
            context->add_fetch({self->core_.id_of(job.key.first), job.key.second}, job.place->path, value);
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
void CallServer::run_in_context(const Job& job, Encoded arguments, const RemoteFunction& function) {
  const auto self = core_.share(this);
  const std::shared_ptr<ContextState> context = core_.contexts.get(job.copy, job.place->context);
  const ContextState::CallKey key(core_.id_of(job.key.first), job.key.second);
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

void CallServer::fail_job(const Job& job, const std::exception_ptr& error) {
  if (job.result != nullptr) return keep(job, {}, error);
  answer(job.key, {}, error);
  unlock_channel(job.channel_lock);
}

// Takes the call out, if somebody still waits for it.
std::optional<RunningCalls::RunningCall> CallServer::end(const Key& key) {
  std::optional<RunningCalls::RunningCall> call;
  {
    const std::lock_guard lock(tables_.mutex);
    call = tables_.running.take(key);
  }
  if (!call) return std::nullopt;
  core_.timers->remove(call->timer);
  call->arguments->drop();
  for (const std::function<void()>& fn : call->on_end) fn();
  return call;
}

void CallServer::keep(const Job& job, ObjectValue value, const std::exception_ptr& error) {
  RunTimer::end(job.key);
  core_.references->set_value(*job.result, std::move(value), error);
  end(job.key);
  unlock_channel(job.channel_lock);
}

// `is_late`: of a call within a context.
void CallServer::answer(const Key& key, Encoded result, std::exception_ptr error,
                        std::optional<bool> is_late) {
  RunTimer::end(key);
  const UnsentMessage unsent(tables_.num_unsent);
  if (!end(key)) return;
  {
    const std::lock_guard lock(tables_.mutex);
    if (tables_.shutdown.is_stopped()) return;
  }
  run_unless_failed(error, [&] {
    core_.references->check_own(result.references);
    References::mark_used(result.references);
  });
  // Also for a result that cannot travel: the caller learns why.
  const auto send_error = [self = core_.share(this), key, unsent](const std::exception_ptr& thrown) {
    Writer out = begin_message(MessageKind::kError, key.second);
    encode(out, describe_exception(thrown));
    self->sender_.send(key.first, out.take());
  };
  if (error) {
    send_error(error);
  } else {
    Writer out = begin_message(MessageKind::kResult, key.second);
    if (is_late) out.number(*is_late);
    out.append(std::move(result));
    sender_.send_when_resolved(key.first, out.take(), send_error);
  }
}

// An object that was not made in time has an error in its place, also while its function still runs.
void CallServer::expire_object(const Job& job) {
  core_.references->set_value(
      *job.result, {},
      std::make_exception_ptr(TimeoutError("rpc.remote", job.function + " was not done in time")));
  cancel(job.key, no_time_is_left());
}

// False where no such call runs.
bool CallServer::cancel(const Key& key, const RemoteException& why) {
  std::optional<RunningCalls::RunningCall> call = end(key);
  if (!call) return false;
  if (call->why_cancelled != nullptr) {
    const std::lock_guard lock(tables_.mutex);
    *call->why_cancelled = why;
  }
  call->stop.request_stop();
  return true;
}

void CallServer::on_cancel(const Key& key, std::uint64_t sequence, const RemoteException& why) {
  if (cancel(key, why)) return;
  const std::lock_guard lock(tables_.mutex);
  tables_.running.arrivals_of(key.first).cancel(sequence);
}

bool CallServer::may_run_here(const std::string& function) const {
  if (core_.options.num_threads == 1 || threads_.is_on_node_thread() || !core_.node->is_own_thread())
    return false;
  return threads_.is_quick(function);
}

void CallServer::run_here(const Job& job) {
  const auto replace = [self = core_.share_weakly(this)] {
    if (const auto server = self.lock()) server->core_.node->replace_thread();
  };
  const HandlerThreads::OnNodeThread runs(threads_);
  const Timers::Key timer = core_.timers->add(base::Deadline::Clock::now() + kPatience, replace);
  run(job);
  core_.timers->remove(timer);
}

void CallServer::run_on_pool(const Job& job) {
  try {
    core_.pool->submit("remote call", [self = core_.share(this), job = queue(job)] { self->run(job); });
  } catch (...) {  // no thread can be had
    fail_job(job, std::current_exception());
  }
}

}  // namespace cohort::rpc
