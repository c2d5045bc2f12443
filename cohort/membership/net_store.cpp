// The server's map is used on the node's own thread: each request is some look-ups, so none waits for another
// one. A wait for keys that are not there is kept, and answered by the request that sets the last of them.
//
// Always: the map has keys of the newest generation that any request named, of the one before it, and of
// none. Processes that finish their step before a planned change still use the one before, while others have
// entered the newest. Who asks for an earlier generation hears so, also who waits: its next request would
// never be answered.
#include "cohort/membership/net_store.h"

#include <algorithm>
#include <charconv>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/future.h"
#include "cohort/membership/internal/store_message.h"
#include "cohort/net/node.h"

namespace cohort::membership {

namespace net_store_detail {
namespace {

using base::concat;
using Status = StoreReply::Status;
using Type = StoreRequest::Type;

constexpr const char* kWhereStore = "membership.net_store";
constexpr std::string_view kGenerationPrefix = "generation/";

// 0: of no generation.
std::uint64_t generation_of_key(std::string_view key) {
  if (!key.starts_with(kGenerationPrefix)) return 0;
  key.remove_prefix(kGenerationPrefix.size());
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
  const bool is_number = error == std::errc() && end != key.data() + key.size() && *end == '/';
  return is_number ? number : 0;
}

std::optional<std::int64_t> count_of(std::string_view text) {
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return count;
}

net::NodeOptions node_options(const char* name, std::optional<base::Secret> secret,
                              std::optional<net::TlsOptions> tls, std::chrono::milliseconds silence) {
  net::NodeOptions options;
  options.name = name;
  options.secret = std::move(secret);
  options.tls = std::move(tls);
  options.silence = silence;
  options.shared_memory = false;  // its messages are short
  return options;
}

class ServerTable : public net::Handler {
 public:
  void on_message(const std::shared_ptr<net::Peer>& peer, net::Message message) override {
    try {
      handle(peer, parse_store_request(message));
    } catch (const CommError& error) {
      base::warn_once("membership.net_store",
                      concat("a request to the store was dropped: ", base::message_of(error)));
    }
  }
  void on_down(const std::shared_ptr<net::Peer>& peer, net::Down) override {
    const std::lock_guard lock(mutex_);
    waits_.remove_if([&](const Wait& wait) { return wait.peer == peer; });
  }
  std::size_t num_keys() const {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  struct Wait {
    std::shared_ptr<net::Peer> peer;
    std::uint64_t number = 0, generation = 0;
    std::vector<std::string> keys;
  };

  void handle(const std::shared_ptr<net::Peer>& peer, StoreRequest request) {
    const std::lock_guard lock(mutex_);
    if (request.type == Type::kCancel) {
      waits_.remove_if([&](const Wait& wait) { return wait.peer == peer && wait.number == request.number; });
      return;
    }
    std::uint64_t generation = 0;
    for (const std::string& key : request.keys) generation = std::max(generation, generation_of_key(key));
    if (generation > newest_) begin_generation(generation);
    StoreReply reply;
    reply.number = request.number;
    if (is_stale(generation)) {
      reply.status = Status::kStale;
    } else if (request.type == Type::kWait && !has_all(request.keys)) {
      waits_.push_back({peer, request.number, generation, std::move(request.keys)});
      return;
    } else {
      answer(request, reply);
    }
    peer->send(message_of(reply));
    const bool may_set = request.type == Type::kSet || request.type == Type::kAdd ||
                         request.type == Type::kCompareSet || request.type == Type::kAppend;
    if (may_set) end_waits();
  }

  bool is_stale(std::uint64_t generation) const { return generation != 0 && generation + 1 < newest_; }

  bool has_all(const std::vector<std::string>& keys) const {
    return std::ranges::all_of(keys, [&](const std::string& key) { return values_.contains(key); });
  }

  void answer(const StoreRequest& request, StoreReply& reply) {
    switch (request.type) {
      case Type::kSet:
        values_[request.keys.front()] = request.bytes;
        break;
      case Type::kAppend:
        values_[request.keys.front()] += request.bytes;
        break;
      case Type::kAdd: {
        const auto found = values_.find(request.keys.front());
        const auto count = count_of(found == values_.end() ? "0" : found->second);
        if (!count || __builtin_add_overflow(*count, request.value, &reply.value)) {
          reply.status = Status::kInvalid;
          break;
        }
        values_[request.keys.front()] = std::to_string(reply.value);
        break;
      }
      case Type::kGet:
        if (!has_all(request.keys)) {
          reply.status = Status::kMissing;
          break;
        }
        for (const std::string& key : request.keys) reply.values.push_back(values_.at(key));
        break;
      case Type::kRemove:
        if (values_.erase(request.keys.front()) == 0) reply.status = Status::kMissing;
        break;
      case Type::kCompareSet: {
        const std::string& key = request.keys.front();
        const auto found = values_.find(key);
        const bool is_there = found != values_.end();
        if (is_there ? found->second == request.expected : request.expected.empty()) {
          values_[key] = request.bytes;
          reply.values = {request.bytes};
        } else if (is_there) {
          reply.values = {found->second};
        }
        break;
      }
      case Type::kHas:
      case Type::kWait:
      case Type::kCancel:
        if (!has_all(request.keys)) reply.status = Status::kMissing;
        break;
    }
  }

  void begin_generation(std::uint64_t generation) {
    newest_ = generation;
    std::erase_if(values_, [&](const auto& entry) { return is_stale(generation_of_key(entry.first)); });
    end_waits();
  }

  // Answers those that have what they wait for, and those that never will.
  void end_waits() {
    waits_.remove_if([&](const Wait& wait) {
      const bool has_ended = is_stale(wait.generation);
      if (!has_ended && !has_all(wait.keys)) return false;
      StoreReply reply;
      reply.number = wait.number;
      reply.status = has_ended ? Status::kStale : Status::kOk;
      wait.peer->send(message_of(reply));
      return true;
    });
  }

  mutable std::mutex mutex_;  // of all below
  std::map<std::string, std::string> values_;
  std::list<Wait> waits_;
  std::uint64_t newest_ = 0;
};

// Requests that are not answered.
class ClientTable : public net::Handler {
 public:
  std::pair<std::uint64_t, base::Future<StoreReply>> begin() {
    const std::lock_guard lock(mutex_);
    if (!end_.empty()) throw CommError(kWhereStore, end_);
    base::Promise<StoreReply> promise("an answer of the store");
    base::Future<StoreReply> future = promise.future();
    const std::uint64_t number = ++last_;
    promises_.emplace(number, std::move(promise));
    return {number, std::move(future)};
  }
  /// No answer is waited for any more.
  void drop(std::uint64_t number) { take(number); }
  void end(const std::string& why) {
    std::map<std::uint64_t, base::Promise<StoreReply>> promises;
    {
      const std::lock_guard lock(mutex_);
      if (end_.empty()) end_ = why;
      promises.swap(promises_);
    }
    for (auto& [number, promise] : promises) {
      promise.set_error(std::make_exception_ptr(CommError(kWhereStore, why)));
    }
  }
  bool has_ended() const {
    const std::lock_guard lock(mutex_);
    return !end_.empty();
  }

  void on_message(const std::shared_ptr<net::Peer>&, net::Message message) override {
    try {
      StoreReply reply = parse_store_reply(message);
      if (auto promise = take(reply.number)) promise->run([&] { return std::move(reply); });
    } catch (const CommError& error) {
      end(base::message_of(error));
    }
  }
  void on_down(const std::shared_ptr<net::Peer>&, net::Down down) override {
    end(concat("the store is gone: ", down.text));
  }

 private:
  std::optional<base::Promise<StoreReply>> take(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    auto entry = promises_.extract(number);
    if (entry.empty()) return std::nullopt;  // nobody waits for it any more
    return std::move(entry.mapped());
  }

  mutable std::mutex mutex_;  // of all below
  std::map<std::uint64_t, base::Promise<StoreReply>> promises_;
  std::uint64_t last_ = 0;
  std::string end_;  // why there will be no answer any more
};

}  // namespace

class Server {
 public:
  explicit Server(NetStoreServerOptions options)
      : table_(std::make_shared<ServerTable>()),
        node_(node_options("store", std::move(options.secret), std::move(options.tls), options.silence),
              table_),
        address_(node_.listen(options.listen, options.host)) {}

  const std::string& address() const { return address_; }
  std::size_t num_keys() const { return table_->num_keys(); }

 private:
  const std::shared_ptr<ServerTable> table_;
  net::Node node_;
  const std::string address_;
};

class Client {
 public:
  explicit Client(NetStoreOptions options)
      : options_(std::move(options)),
        table_(std::make_shared<ClientTable>()),
        node_(node_options("a client of the store", options_.secret, options_.tls, options_.silence), table_),
        peer_(node_.connect(options_.address, options_.deadline.sooner(base::Deadline(options_.timeout)))) {}
  ~Client() { close(); }

  bool is_down() const { return table_->has_ended(); }
  void close() { table_->end(concat("the client of the store at ", options_.address, " was closed")); }

  /// Ends after the timeout, or at `deadline`.
  StoreReply ask(StoreRequest request, base::Deadline deadline) {
    if (deadline.expired()) {
      throw TimeoutError(kWhereStore,
                         concat("timed out before the store at ", options_.address, " could be asked"),
                         "a longer timeout");
    }
    const base::Deadline own(options_.timeout);
    auto reply = ask_until(std::move(request), own.sooner(deadline));
    if (reply) return *std::move(reply);
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(own.elapsed());
    throw TimeoutError(kWhereStore,
                       concat("the store at ", options_.address, " did not answer within ",
                              std::min(waited, options_.timeout).count(), " ms"),
                       "the log of the agent that has it");
  }
  /// Nothing where the deadline passes first.
  std::optional<StoreReply> ask_until(StoreRequest request, base::Deadline deadline) {
    const bool is_wait = request.type == Type::kWait;
    const std::string key = request.keys.empty() ? "" : request.keys.front();
    auto [number, future] = table_->begin();
    request.number = number;
    peer_->send(message_of(request));
    if (!future.wait(deadline)) {
      table_->drop(number);
      if (is_wait) peer_->send(message_of(StoreRequest{.type = Type::kCancel, .number = number}));
      return std::nullopt;
    }
    StoreReply reply = future.get(base::Deadline(std::chrono::seconds(1)));
    if (reply.status == Status::kStale) {
      throw StaleGeneration(kWhereStore, concat("key ", key, " is of a generation that has ended"));
    }
    return reply;
  }

 private:
  const NetStoreOptions options_;
  const std::shared_ptr<ClientTable> table_;
  net::Node node_;
  const std::shared_ptr<net::Peer> peer_;
};

}  // namespace net_store_detail

using Status = StoreReply::Status;
using Type = StoreRequest::Type;

NetStoreServer::NetStoreServer(NetStoreServerOptions options)
    : server_(std::make_shared<net_store_detail::Server>(std::move(options))) {}
NetStoreServer::~NetStoreServer() = default;
const std::string& NetStoreServer::address() const {
  return server_->address();
}
std::size_t NetStoreServer::num_keys() const {
  return server_->num_keys();
}

NetStore::NetStore(NetStoreOptions options)
    : client_(std::make_shared<net_store_detail::Client>(std::move(options))) {}
NetStore::NetStore(std::shared_ptr<net_store_detail::Client> client, base::Deadline deadline)
    : client_(std::move(client)), deadline_(deadline) {}
NetStore::~NetStore() = default;
NetStore NetStore::until(base::Deadline deadline) const {
  return {client_, deadline_.sooner(deadline)};
}

void NetStore::set(const std::string& key, const std::string& value) {
  client_->ask({.type = Type::kSet, .keys = {key}, .bytes = value}, deadline_);
}
bool NetStore::has(const std::string& key) {
  return has_all({key});
}
bool NetStore::has_all(const std::vector<std::string>& keys) {
  return client_->ask({.type = Type::kHas, .keys = keys}, deadline_).status == Status::kOk;
}
std::string NetStore::get(const std::string& key) {
  return get_all({key}).front();
}
std::vector<std::string> NetStore::get_all(const std::vector<std::string>& keys) {
  StoreReply reply = client_->ask({.type = Type::kGet, .keys = keys}, deadline_);
  if (reply.status == Status::kOk && reply.values.size() == keys.size()) return std::move(reply.values);
  throw MissingKey("membership.net_store",
                   base::concat("the store lacks one of ", keys.size(), " keys: ", keys.front()));
}
std::int64_t NetStore::add(const std::string& key, std::int64_t value) {
  const StoreReply reply = client_->ask({.type = Type::kAdd, .value = value, .keys = {key}}, deadline_);
  if (reply.status == Status::kOk) return reply.value;
  throw UsageError("membership.net_store",
                   base::concat("key ", key, " has a value to which ", value, " cannot be added"));
}
bool NetStore::wait(const std::vector<std::string>& keys, base::Deadline deadline) {
  return client_->ask_until({.type = Type::kWait, .keys = keys}, deadline_.sooner(deadline)).has_value();
}
void NetStore::append(const std::string& key, const std::string& bytes) {
  client_->ask({.type = Type::kAppend, .keys = {key}, .bytes = bytes}, deadline_);
}
bool NetStore::erase(const std::string& key) {
  return client_->ask({.type = Type::kRemove, .keys = {key}}, deadline_).status == Status::kOk;
}
std::string NetStore::compare_set(const std::string& key, const std::string& expected,
                                  const std::string& value) {
  const StoreReply reply = client_->ask(
      {.type = Type::kCompareSet, .keys = {key}, .bytes = value, .expected = expected}, deadline_);
  return reply.values.empty() ? expected : reply.values.front();
}
bool NetStore::is_down() const {
  return client_->is_down();
}
void NetStore::close() {
  client_->close();
}

}  // namespace cohort::membership
