// A read gives the record and etcd's revision R; a watch then gives what changes from R + 1 on. A watch that
// ends begins again after the last change that was told. Where etcd has thrown the changes away (compaction)
// the record is read anew.
//
// A watch that hangs looks like one that has nothing to say: its member may be stopped, or cut off from the
// others. So once a second the key's revision is asked for, by a read that etcd's majority confirms. If it
// fails, the next endpoint is asked, and watched. A watch that did not tell what a read has found is made
// anew.
//
// A compare-and-swap that had no answer may have been made, or may be made later. To send it again is safe:
// at most one of them changes the record, since each compares the same revision. If it was an earlier one,
// etcd answers with a conflict and this very text, which counts as made, as it does where a watch or a read
// tells it first; where somebody has changed the record since, nobody can tell. After `swap_timeout` it is
// unknown; then the record is read until etcd answers.
//
// The record of a run that has ended is written with a lease, so that late agents hear of the end, and the
// same run id can be used later. No other record has one: agents that are cut off for a while must find it
// again.
#include "cohort/membership/etcd/internal/client.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/files/private_file.h"
#include "cohort/base/log.h"

namespace cohort::membership::etcd {
namespace {

using base::concat;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Type = Rejection::Type;

constexpr seconds kCheckTime(1);
constexpr seconds kEndedTime(60);  // that the record of a run that has ended is kept
constexpr milliseconds kFirstPause(20), kLongestPause(1'000);
constexpr const char* kEtcd = "etcd";

// Before the next try, after so many failures of which `num_free` cost no pause.
milliseconds pause_after(int num_failures, int num_free) {
  if (num_failures <= num_free) return milliseconds(0);
  return std::min(kLongestPause, kFirstPause * (1 << std::min(num_failures - num_free - 1, 6)));
}

std::string name_of(const std::string& endpoint) {
  return concat("etcd at ", endpoint);
}

}  // namespace

Client::Client(EtcdOptions options, HasEnded has_ended, HttpClient& http, RecordStore::Listener listener)
    : options_(std::move(options)),
      has_ended_(has_ended),
      key_(options_.prefix + options_.run_id),
      http_(http),
      listener_(std::move(listener)),
      needs_login_(!options_.user.empty()) {}

void Client::read() {
  wants_read_ = is_asked_ = true;
}

// One that the caller gives up, in that it begins another one, may be made all the same.
void Client::swap(std::uint64_t expected, std::string text, Time now) {
  stop(lease_);
  stop(put_);
  lease_.next = put_.next = now;
  const bool needs_lease = has_ended_(text);
  swap_ = Swap{.expected = expected,
               .text = std::move(text),
               .deadline = now + options_.swap_timeout,
               .needs_lease = needs_lease,
               .lease = {}};
}

void Client::start(Operation& operation, const char* path, std::string body) {
  operation.endpoint = endpoint();
  operation.is_beta = is_beta_;
  operation.told = told_.revision;
  // One that is slow as a whole would not answer any try.
  const int num_rounds = operation.num_failures / static_cast<int>(options_.endpoints.size());
  operation.id = http_.start({.endpoint = endpoint(),
                              .path = concat(is_beta_ ? "/v3beta" : "/v3", path),
                              .body = std::move(body),
                              .token = token_,
                              .timeout = options_.request_timeout * (1 << std::min(num_rounds, 3)),
                              .is_stream = &operation == &watch_,
                              .may_repeat = &operation != &put_});
}

void Client::stop(Operation& operation) {
  http_.cancel(std::exchange(operation.id, 0));
}

Time Client::advance(Time now) {
  if (needs_login_) {
    if (login_.id == 0 && now >= login_.next) start_login(now);
  } else {
    if (wants_read_ && read_.id == 0 && now >= read_.next) {
      start(read_, "/kv/range", read_request(key_, true));
    }
    if (!wants_read_ && check_.id == 0 && now >= std::max(next_check_, check_.next)) {
      start(check_, "/kv/range", read_request(key_, false));
    }
    if (watch_from_ != 0 && watch_.id == 0 && now >= watch_.next) {
      start(watch_, "/watch", watch_request(key_, watch_from_));
    }
  }
  advance_swap(now);
  Time next = now + kCheckTime;
  if (swap_) next = std::min(next, swap_->deadline);
  for (const Time time :
       {login_.next, read_.next, check_.next, lease_.next, put_.next, watch_.next, next_check_}) {
    if (time > now) next = std::min(next, time);
  }
  return next;
}

void Client::advance_swap(Time now) {
  if (!swap_) return;
  if (now >= swap_->deadline) {
    stop(lease_);
    stop(put_);
    swap_.reset();
    wants_read_ = is_asked_ = true;
    return notify(StoreAnswer::Type::kUnknown, {});
  }
  if (needs_login_) return;
  if (swap_->needs_lease && !swap_->lease) {
    if (lease_.id == 0 && now >= lease_.next) start(lease_, "/lease/grant", lease_request(kEndedTime));
  } else if (put_.id == 0 && now >= put_.next) {
    ++swap_->num_sent;
    start(put_, "/kv/txn", swap_request(key_, swap_->expected, swap_->text, swap_->lease));
  }
}

void Client::start_login(Time now) {
  try {
    const std::string password = base::read_private_file(options_.password_file, "membership.etcd",
                                                         "the file of etcd's password", 4'096);
    token_.clear();
    start(login_, "/auth/authenticate", login_request(options_.user, password));
  } catch (const UsageError& error) {
    fail(login_, {Type::kOther, base::message_of(error)}, now);
  }
}

void Client::on_event(const HttpEvent& event, Time now) {
  const std::array<Operation*, 6> operations{&login_, &read_, &check_, &lease_, &put_, &watch_};
  const auto found = std::find_if(operations.begin(), operations.end(),
                                  [&](const Operation* operation) { return operation->id == event.id; });
  if (found == operations.end()) return;  // it was stopped
  Operation& operation = **found;
  try {
    if (event.is_line) return on_watch(event.text, now);
    operation.id = 0;
    if (event.status == 0) {
      fail(operation, {Type::kEndpoint, event.text}, now);
    } else if (event.status != 200) {
      fail(operation, parse_rejection(event.status, event.text), now);
    } else {
      on_success(operation, event.text, now);
    }
  } catch (const CommError& error) {
    stop(operation);
    fail(operation, {Type::kEndpoint, base::message_of(error)}, now);
  }
}

void Client::on_success(Operation& operation, const std::string& text, Time now) {
  if (&operation == &watch_) return fail(watch_, {Type::kEndpoint, "it has ended the watch"}, now);
  if (&operation == &login_) {
    token_ = parse_login(text);
    needs_login_ = false;
  } else if (&operation == &read_) {
    on_read(parse_read(text), now);
  } else if (&operation == &check_) {
    const ReadAnswer answer = parse_read(text);
    check_cluster(answer.header);
    wants_read_ = wants_read_ || answer.entry.revision != told_.revision;
    next_check_ = now + kCheckTime;
  } else if (&operation == &lease_) {
    const std::uint64_t lease = parse_lease(text);
    if (swap_) swap_->lease = lease;
  } else {
    on_swap(parse_swap(text));
  }
  note_success(operation);
}

void Client::note_success(Operation& operation) {
  operation.num_failures = 0;
  problems_.clear(name_of(operation.endpoint), operation.what);
  problems_.clear(kEtcd, operation.what);
}

// Two members that were not told of each other are two clusters, each with a record of its own.
void Client::check_cluster(const Header& header) {
  if (cluster_ == 0) {
    cluster_ = header.cluster;
    base::log_info(
        concat("the record of run ", options_.run_id, " is in etcd at ", endpoint(), ", as ", key_));
  } else if (header.cluster != cluster_) {
    throw CommError("membership.etcd", "it belongs to another cluster than an endpoint that answered before",
                    "the endpoints of one cluster");
  }
}

void Client::on_read(const ReadAnswer& answer, Time now) {
  check_cluster(answer.header);
  wants_read_ = false;
  next_check_ = now + kCheckTime;
  const EtcdKeyValue entry = newest(answer.entry, read_.told);
  const bool is_news = entry.revision > told_.revision;
  // A watch that lives tells a change before a read does.
  if (is_news) stop(watch_);
  if (watch_.id == 0) watch_from_ = answer.header.revision + 1;
  if (std::exchange(is_asked_, false) || is_news) notify(StoreAnswer::Type::kRecord, entry);
}

void Client::on_swap(const SwapAnswer& answer) {
  check_cluster(answer.header);
  if (!swap_) return;
  const Swap swap = *std::exchange(swap_, std::nullopt);
  if (answer.is_made) return notify(StoreAnswer::Type::kSwapped, {answer.header.revision, swap.text});
  const EtcdKeyValue entry = newest(answer.entry, put_.told);
  if (swap.num_sent == 1) return notify(StoreAnswer::Type::kConflict, entry);
  if (entry.text == swap.text) return notify(StoreAnswer::Type::kSwapped, entry);
  notify(StoreAnswer::Type::kUnknown, {});
  notify(StoreAnswer::Type::kRecord, entry);
}

void Client::on_watch(const std::string& line, Time now) {
  const WatchAnswer answer = parse_watch(line);
  if (answer.is_canceled) {
    stop(watch_);
    if (answer.compacted == 0) return fail(watch_, rejection_of(answer.reason), now);
    watch_from_ = 0;
    wants_read_ = true;
    return;
  }
  check_cluster(answer.header);
  note_success(watch_);
  if (answer.changed_at == 0) return;
  watch_from_ = answer.changed_at + 1;
  if (!answer.entry) {
    wants_read_ = true;
  } else if (answer.entry->revision > told_.revision) {
    notify(StoreAnswer::Type::kRecord, *answer.entry);
  }
}

void Client::fail(Operation& operation, const Rejection& rejection, Time now) {
  int num_free = 0;
  ++operation.num_failures;
  switch (rejection.type) {
    case Type::kLogin:
      num_free = 1;
      needs_login_ = !options_.user.empty();
      if (!needs_login_ || operation.num_failures > 1) problems_.note(kEtcd, operation.what, rejection.text);
      break;
    case Type::kNoLogin:
      needs_login_ = false;
      problems_.note(kEtcd, operation.what, rejection.text);
      break;
    case Type::kOther:
      if (&operation == &lease_ && swap_) swap_->needs_lease = false;  // the end of the run matters more
      problems_.note(kEtcd, operation.what, rejection.text);
      break;
    case Type::kNoPath:
      if (operation.is_beta == is_beta_) is_beta_ = !is_beta_;
      num_free = 1;
      if (operation.num_failures % 2 == 1) break;
      [[fallthrough]];
    case Type::kEndpoint:
      num_free += static_cast<int>(options_.endpoints.size()) - 1;
      problems_.note(name_of(operation.endpoint), operation.what, rejection.text);
      if (operation.endpoint == endpoint()) leave_endpoint(now);
      break;
  }
  operation.next = now + pause_after(operation.num_failures, num_free);
}

void Client::leave_endpoint(Time now) {
  endpoint_ = (endpoint_ + 1) % options_.endpoints.size();
  // It may hang as the request did that has failed.
  if (watch_.id == 0) return;
  stop(watch_);
  watch_.next = now;
}

// The entry, or what was told of a later one while the answer was on its way. Where that was told before the
// request was sent, etcd has lost it.
EtcdKeyValue Client::newest(const EtcdKeyValue& entry, std::uint64_t told) {
  if (entry.revision >= told_.revision) return entry;
  if (entry.revision >= told) return told_;
  if (!has_ended_(told_.text)) {  // else its time is over
    problems_.note(kEtcd, "the record",
                   concat(key_,
                          " was deleted, or etcd has lost its data: no generation can follow. Try: end "
                          "the run, and resume it from its last checkpoint"));
  }
  return entry;
}

void Client::notify(StoreAnswer::Type type, const EtcdKeyValue& entry) {
  if (entry.revision > told_.revision) told_ = entry;
  listener_({type, entry.revision, entry.text});
  // A swap that waits for its answer has it where its text is news.
  if (type != StoreAnswer::Type::kRecord || !swap_ || swap_->num_sent == 0) return;
  if (entry.revision <= swap_->expected || entry.text != swap_->text) return;
  stop(put_);
  swap_.reset();
  listener_({StoreAnswer::Type::kSwapped, entry.revision, entry.text});
}

}  // namespace cohort::membership::etcd
