// The kinds of statement. Each says twice what it makes of y: `remote` by calls, `plain` in one process. Both
// take all their choices from the statement, which is drawn before. What plain code does under NoGradGuard,
// calls do where nothing is recorded.
#include "tests/rpc/autograd/dist_autograd_program.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cohort/autograd/recompute.h"
#include "cohort/base/error.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/base/threads/wait.h"
#include "cohort/rpc/internal/context_scope.h"
#include "tests/rpc/job.h"

namespace cohort::rpc::programs {
namespace {

using Int = std::int64_t;

std::atomic<Int> num_workers{1};

Agent& agent_at(Int place) {
  return test::agent_of(worker_of(place));
}

struct Statement {
  std::size_t kind = 0;
  Int here = 0;                          // the program's place
  Int there = 0, second = 0, third = 0;  // places that it calls; they may be the same
  Int seed = 0, other_seed = 0;          // of the programs there
  Int depth = 0;                         // of these
  unsigned bits = 0;                     // which variant
  bool has(int bit) const { return (bits >> bit & 1U) != 0; }
};

at::Tensor random_program(Int place, Int seed, Int depth, const at::Tensor& x) {
  return run_program(Execution::kRemote, place, seed, depth, x);
}
COHORT_REMOTE(random_program);

Future<at::Tensor> call(const Statement& s, Int place, Int seed, const at::Tensor& x) {
  return agent_at(s.here).rpc_async<random_program>(worker_of(place), place, seed, s.depth, x);
}
at::Tensor plain_call(const Statement& s, Int place, Int seed, const at::Tensor& x) {
  return run_program(Execution::kPlain, place, seed, s.depth, x);
}

struct Multiply {
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    return y * weight_of(s.here, s.has(0) ? 1 : 0);
  }
  static at::Tensor remote(const Statement& s, const at::Tensor& y) { return plain(s, y); }
};

struct Sine {
  static at::Tensor plain(const Statement&, const at::Tensor& y) { return y.sin(); }
  static at::Tensor remote(const Statement& s, const at::Tensor& y) { return plain(s, y); }
};

struct PlainCall {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    return y + call(s, s.there, s.seed, y * 0.5).get();
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    return y + plain_call(s, s.there, s.seed, y * 0.5);
  }
};

struct UnusedCall {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    call(s, s.there, s.seed, y).get();
    return y;
  }
  static at::Tensor plain(const Statement&, const at::Tensor& y) { return y; }
};

struct NoGradCall {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    at::Tensor z;
    {
      const at::NoGradGuard no_grad;
      z = call(s, s.there, s.seed, y * 0.5).get();
    }
    return y + z;
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    at::Tensor z;
    {
      const at::NoGradGuard no_grad;
      z = plain_call(s, s.there, s.seed, y * 0.5);
    }
    return y + z;
  }
};

struct DetachedCall {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    return y + call(s, s.there, s.seed, y.detach()).get();
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    return y + plain_call(s, s.there, s.seed, y.detach());
  }
};

// Three calls under way. They are waited for in another order; the last sometimes not at all.
struct CallsInFlight {
  static at::Tensor sum(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    const at::Tensor z = y + a * b;
    return c.defined() ? z + c : z;
  }
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    Future<at::Tensor> a = call(s, s.there, s.seed, y), b = call(s, s.second, s.other_seed, y * 0.5),
                       c = call(s, s.here, s.seed + 1, y);
    const at::Tensor of_c = s.has(0) ? c.get() : at::Tensor();
    const at::Tensor of_b = b.get();
    return sum(y, a.get(), of_b, of_c);
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    const at::Tensor a = plain_call(s, s.there, s.seed, y),
                     b = plain_call(s, s.second, s.other_seed, y * 0.5);
    return sum(y, a, b, s.has(0) ? plain_call(s, s.here, s.seed + 1, y) : at::Tensor());
  }
};

// A handler that answers later: with the answer to a call of its own, or with what it computes. Nothing of
// that is recorded.
Future<at::Tensor> program_later(Int place, Int next, Int seed, Int depth, const at::Tensor& x) {
  if (next != place) return agent_at(place).rpc_async<random_program>(worker_of(next), next, seed, depth, x);
  Promise<at::Tensor> result;
  result.set_value(random_program(place, seed, depth, x));
  return result.future();
}
COHORT_REMOTE(program_later);

struct LaterCall {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    Agent& agent = agent_at(s.here);
    const std::string worker = worker_of(s.there);
    const at::Tensor x = y * 0.5;
    if (s.has(0)) {
      return y + agent.remote<program_later>(worker, s.there, s.second, s.seed, s.depth, x).to_here();
    }
    return y + agent.rpc_sync<program_later>(worker, s.there, s.second, s.seed, s.depth, x);
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    at::Tensor z;
    {
      const at::NoGradGuard no_grad;
      z = plain_call(s, s.second, s.seed, y * 0.5);
    }
    return y + z;
  }
};

// A struct of containers: a tensor that comes twice, one without a gradient, one that is not there.
struct Parcel {
  at::Tensor head;
  std::vector<at::Tensor> list;
  std::map<std::string, at::Tensor> named;
  std::tuple<at::Tensor, double> scaled;
  std::optional<at::Tensor> last;
  at::Tensor sum() const {
    at::Tensor total = head;
    for (const at::Tensor& tensor : list) total = total + tensor;
    for (const auto& [name, tensor] : named) total = total + tensor;
    return total * 0.2 + std::get<0>(scaled) * std::get<1>(scaled);
  }
};
COHORT_NESTED(Parcel, head, list, named, scaled, last)

Parcel pack(const at::Tensor& y) {
  return {y, {y * 2, y.detach(), y}, {{"cosine", y.cos()}, {"sine", y.sin()}}, {y * 0.5, 0.25}, std::nullopt};
}
Parcel open_parcel(Execution execution, Int place, Int seed, Int depth, const Parcel& given) {
  const at::Tensor x = given.sum();
  return {run_program(execution, place, seed, depth, x),
          {given.head, weight_of(place, 0)},
          {{"cosine", given.list.at(0).cos()}},
          {x.detach(), 0.1},
          given.named.at("sine")};
}
Parcel program_of_parcel(Int place, Int seed, Int depth, const Parcel& given) {
  return open_parcel(Execution::kRemote, place, seed, depth, given);
}
at::Tensor use_parcel(const Statement& s, const at::Tensor& y, const Parcel& parcel) {
  at::Tensor z = y;
  if (s.has(0)) z = z + parcel.head;
  if (s.has(1)) z = z * parcel.list.at(1);
  if (s.has(2)) z = z + parcel.list.at(0) * std::get<0>(parcel.scaled);
  if (s.has(3)) z = z + *parcel.last;
  return z;
}
COHORT_REMOTE(program_of_parcel);
COHORT_REMOTE(Parcel::sum);

struct StructCall {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    return use_parcel(
        s, y,
        agent_at(s.here).rpc_sync<program_of_parcel>(worker_of(s.there), s.there, s.seed, s.depth, pack(y)));
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    return use_parcel(s, y, open_parcel(Execution::kPlain, s.there, s.seed, s.depth, pack(y)));
  }
};

at::Tensor sine_of_parcel(bool is_owner, const RRef<Parcel>& object) {
  return (is_owner ? *object.local_value() : object.to_here()).sum().sin();
}
COHORT_REMOTE(sine_of_parcel);

// It is used here, by its member function, and by a function on any worker; or not at all.
struct StructObject {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    Agent& agent = agent_at(s.here);
    const RRef<Parcel> object =
        agent.remote<program_of_parcel>(worker_of(s.there), s.there, s.seed, s.depth, pack(y));
    at::Tensor z = s.has(4) ? use_parcel(s, y, object.to_here()) : y;
    if (s.has(5)) z = z + object.rpc_sync<&Parcel::sum>();
    if (s.has(6)) {
      z = z + agent.rpc_sync<sine_of_parcel>(worker_of(s.second), s.second == s.there && s.has(7), object);
    }
    return z;
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    const Parcel parcel = open_parcel(Execution::kPlain, s.there, s.seed, s.depth, pack(y));
    at::Tensor z = s.has(4) ? use_parcel(s, y, parcel) : y;
    if (s.has(5)) z = z + parcel.sum();
    if (s.has(6)) z = z + parcel.sum().sin();
    return z;
  }
};

// Makes an object by another program, here or there, and returns a reference to it.
RRef<at::Tensor> make_by_program(Int place, Int there, Int seed, Int depth, const at::Tensor& x) {
  Agent& agent = agent_at(place);
  if (there == place) return agent.make_rref(random_program(place, seed, depth, x));
  return agent.remote<random_program>(worker_of(there), there, seed, depth, x);
}
at::Tensor program_of_object(Int place, bool is_owner, Int seed, Int depth, const RRef<at::Tensor>& x) {
  const at::Tensor y = random_program(place, seed, depth, is_owner ? *x.local_value() : x.to_here());
  return y + x.to_here();
}
COHORT_REMOTE(make_by_program);
COHORT_REMOTE(program_of_object);

// It is made here or by another worker, lies anywhere, and is used here, elsewhere, or not at all.
struct TensorObject {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    Agent& agent = agent_at(s.here);
    const Int maker = s.has(0) ? s.here : s.there;
    const RRef<at::Tensor> object =
        maker == s.here
            ? make_by_program(s.here, s.second, s.seed, s.depth, y * 0.5)
            : agent.rpc_sync<make_by_program>(worker_of(maker), maker, s.second, s.seed, s.depth, y * 0.5);
    at::Tensor z = s.has(1) ? y + object.to_here() : y;
    if (s.has(2)) {
      const bool is_owner = s.third == s.second && s.has(4);
      z = z + agent.rpc_sync<program_of_object>(worker_of(s.third), s.third, is_owner, s.other_seed, s.depth,
                                                object);
    }
    return s.has(3) ? z * object.to_here_async().get() : z;
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    const at::Tensor value = plain_call(s, s.second, s.seed, y * 0.5);
    at::Tensor z = s.has(1) ? y + value : y;
    if (s.has(2)) z = z + (plain_call(s, s.third, s.other_seed, value) + value);
    return s.has(3) ? z * value : z;
  }
};

at::Tensor program_weight(Int place, Int index) {
  return weight_of(place, index);
}
at::Tensor times_fetched(const at::Tensor& x, const RRef<at::Tensor>& object) {
  return x * object.to_here();
}
COHORT_REMOTE(program_weight);
COHORT_REMOTE(times_fetched);

struct ParameterObject {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    Agent& agent = agent_at(s.here);
    const RRef<at::Tensor> object = agent.remote<program_weight>(worker_of(s.there), s.there, 0);
    at::Tensor z = y * object.to_here();
    if (s.has(0)) z = z + agent.rpc_sync<times_fetched>(worker_of(s.second), y, object);
    return s.has(1) ? z * weight_of(s.here, 0) + object.to_here() : z;
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    const at::Tensor& weight = weight_of(s.there, 0);
    at::Tensor z = y * weight;
    if (s.has(0)) z = z + y * weight;
    return s.has(1) ? z * weight_of(s.here, 0) + weight : z;
  }
};

// An object that keeps an argument, and gives it to a later call.
class Notebook {
 public:
  void keep(const at::Tensor& x) { x_ = x; }
  at::Tensor recall() const { return x_ * 0.5; }
  at::Tensor recall_detached() const { return x_.detach() * 0.5; }

 private:
  at::Tensor x_;
};
std::shared_ptr<Notebook> make_notebook() {
  return std::make_shared<Notebook>();
}
COHORT_REMOTE(make_notebook);
COHORT_REMOTE(Notebook::keep);
COHORT_REMOTE(Notebook::recall);
COHORT_REMOTE(Notebook::recall_detached);

// If a gradient would end at the argument that was kept, the later call fails.
struct KeptArgument {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    const RRef<Notebook> notebook = agent_at(s.here).remote<make_notebook>(worker_of(s.there));
    notebook.rpc_sync<&Notebook::keep>(y * 2);
    if (s.has(0)) return y + notebook.rpc_sync<&Notebook::recall_detached>();
    try {
      return y + notebook.rpc_sync<&Notebook::recall>();
    } catch (const UsageError& error) {
      const std::string_view what = error.what();
      if (what.find("an argument of an earlier call") == std::string_view::npos) throw;
      return y + 1;
    }
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    const at::Tensor kept = y * 2;
    return y + (s.has(0) || !kept.requires_grad() ? kept.detach() * 0.5 : at::ones({}));
  }
};

// By which a call hands an object to a later one.
class Mailbox {
 public:
  void post(Int key, RRef<at::Tensor> object) {
    const std::lock_guard lock(mutex_);
    objects_.emplace(key, std::move(object));
    changed_.notify_all();
  }
  RRef<at::Tensor> take(Int key) {
    const base::ThreadPool::Waiting waiting;
    std::unique_lock lock(mutex_);
    if (!base::wait(changed_, lock, [&] { return objects_.count(key) > 0; }, test::patience())) {
      throw TimeoutError("test.mailbox", "nobody has posted the object");
    }
    return objects_.extract(key).mapped();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Int, RRef<at::Tensor>> objects_;
};
Mailbox mailbox;
std::atomic<Int> next_key{0};

at::Tensor post_object(Int place, Int key, Int seed, Int depth, const at::Tensor& x) {
  RRef<at::Tensor> object;
  try {
    object = agent_at(place).make_rref(random_program(place, seed, depth, x));
  } catch (...) {
    mailbox.post(key, {});  // who takes it fails too, at once
    throw;
  }
  mailbox.post(key, object);
  // So it answers later than the call that takes the object.
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return x.detach();
}
at::Tensor times_posted(Int key, const at::Tensor& x) {
  return x * mailbox.take(key).to_here();
}
COHORT_REMOTE(post_object);
COHORT_REMOTE(times_posted);

// Nobody waits for the call that makes the object.
struct PostedObject {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    Agent& agent = agent_at(s.here);
    const std::string worker = worker_of(s.there);
    const Int key = next_key++;
    if (s.has(0)) {
      agent.remote<post_object>(worker, s.there, key, s.seed, s.depth, y * 0.5);
    } else {
      agent.rpc_async<post_object>(worker, s.there, key, s.seed, s.depth, y * 0.5);
    }
    return y + agent.rpc_sync<times_posted>(worker, key, y);
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    return y + y * plain_call(s, s.there, s.seed, y * 0.5);
  }
};

// A program at the same place runs twice, with all that it calls. Not in a handler that answers later:
// outside of contexts the value of an object on its own worker may have a graph, which recompute() rejects.
struct Recomputed {
  static at::Tensor remote(const Statement& s, const at::Tensor& y) {
    const auto fn = [s](const at::Tensor& x) { return random_program(s.here, s.seed, s.depth, x); };
    return y + (ContextScope::current() == nullptr ? fn(y * 0.5) : autograd::recompute(fn, y * 0.5));
  }
  static at::Tensor plain(const Statement& s, const at::Tensor& y) {
    return y + plain_call(s, s.here, s.seed, y * 0.5);
  }
};

struct StatementKind {
  const char* name;
  at::Tensor (*remote)(const Statement& s, const at::Tensor& y);
  at::Tensor (*plain)(const Statement& s, const at::Tensor& y);
};
template <typename K>
constexpr StatementKind kind(const char* name) {
  return {name, K::remote, K::plain};
}
constexpr StatementKind kKinds[] = {
    kind<Multiply>("multiply"),
    kind<Sine>("sine"),
    // From here on, those that call.
    kind<PlainCall>("call"),
    kind<UnusedCall>("unused call"),
    kind<NoGradCall>("call without gradients"),
    kind<DetachedCall>("call of a detached value"),
    kind<CallsInFlight>("calls in flight"),
    kind<LaterCall>("handler that answers later"),
    kind<StructCall>("struct"),
    kind<StructObject>("object of a struct"),
    kind<TensorObject>("object"),
    kind<ParameterObject>("parameter as an object"),
    kind<KeptArgument>("argument that is kept"),
    kind<PostedObject>("object of a call without an answer"),
    kind<Recomputed>("recomputed program"),
};
constexpr unsigned kNumLocal = 2;

std::vector<Statement> statements_of(Int place, Int seed, Int depth) {
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  const auto pick = [&](unsigned below) { return static_cast<Int>(random() % below); };
  std::vector<Statement> statements(static_cast<std::size_t>(1 + pick(4)));
  for (Statement& s : statements) {
    s.kind =
        static_cast<std::size_t>(pick(depth == 0 ? kNumLocal : static_cast<unsigned>(std::size(kKinds))));
    s.here = place;
    for (Int* const other : {&s.there, &s.second, &s.third}) *other = pick(kPlaces);
    for (Int* const number : {&s.seed, &s.other_seed}) *number = pick(1'000'000);
    s.depth = depth - 1;
    s.bits = static_cast<unsigned>(random() >> 8U);
  }
  return statements;
}

}  // namespace

void set_num_workers(std::int64_t number) {
  num_workers = number;
}

std::string worker_of(std::int64_t place) {
  return "w" + std::to_string(place % num_workers);
}

const at::Tensor& weight_of(std::int64_t place, std::int64_t index) {
  static const std::vector<at::Tensor> weights = [] {
    std::vector<at::Tensor> made;
    for (Int i = 0; i < 2 * kPlaces; ++i) {
      made.push_back((at::linspace(0.5, 1.5, 8, at::kFloat) + 0.1 * static_cast<double>(i)).requires_grad_());
    }
    return made;
  }();
  return weights.at(static_cast<std::size_t>(2 * place + index));
}

// Results are at most 1, so that numbers stay small however programs call each other.
at::Tensor run_program(Execution execution, std::int64_t place, std::int64_t seed, std::int64_t depth,
                       const at::Tensor& x) {
  at::Tensor y = x;
  for (const Statement& s : statements_of(place, seed, depth)) {
    y = (execution == Execution::kRemote ? kKinds[s.kind].remote : kKinds[s.kind].plain)(s, y);
  }
  return seed % 11 == 0 ? y.sin().detach() : y.sin();
}

std::string describe_program(std::int64_t seed, std::int64_t depth) {
  std::string text;
  for (const Statement& s : statements_of(0, seed, depth)) {
    text += text.empty() ? "" : ", ";
    text += kKinds[s.kind].name;
  }
  return text;
}

}  // namespace cohort::rpc::programs
