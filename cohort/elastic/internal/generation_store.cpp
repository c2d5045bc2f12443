// Each request is one of NetStore's, with the generation's prefix before its keys. Always: where the store is
// gone, or the generation's keys are, that is taken for news of the generation's end, and its owner says
// whether it is. So whoever waits in the store throws what waits for another process throw. A wrong call
// throws at once.
#include "cohort/elastic/internal/generation_store.h"

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/text/format_list.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/elastic/session.h"

namespace cohort::elastic {
namespace {

using std::chrono::milliseconds;

std::string text_of_bytes(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}
std::vector<std::uint8_t> bytes_of_text(const std::string& text) {
  return {text.begin(), text.end()};
}

}  // namespace

GenerationStore::GenerationStore(Connect connect, std::shared_ptr<comm::GroupOwner> owner, std::string prefix,
                                 milliseconds timeout)
    : Store(timeout), connect_(std::move(connect)), owner_(std::move(owner)), prefix_(std::move(prefix)) {}

// A store that fails is news of its agent's end, and so of the generation's.
template <typename Body>
auto GenerationStore::ask(Body body) {
  // The store keeps the keys for a while.
  if (const std::exception_ptr end = owner_->end()) std::rethrow_exception(end);
  owner_->check_call();
  const comm::OwnerWait waiting(owner_.get());
  try {
    membership::NetStore client = connect_()->until(comm::StoreDeadline::current());
    return body(client);
  } catch (const TimeoutError&) {
    if (const std::exception_ptr end = owner_->end()) std::rethrow_exception(end);
    throw;
  } catch (const membership::MissingKey&) {
    throw;  // the store has answered
  } catch (const membership::StaleGeneration& error) {
    if (const std::exception_ptr end = owner_->wait_for_end()) std::rethrow_exception(end);
    throw GenerationEnded("elastic.store", base::message_of(error), "Session::enter()");
  } catch (const RendezvousError&) {  // of another link, in the time that the call has
    const bool is_late = comm::StoreDeadline::current().expired();
    if (const std::exception_ptr end = is_late ? owner_->end() : owner_->wait_for_end()) {
      std::rethrow_exception(end);
    }
    throw;
  } catch (const CommError&) {
    if (const std::exception_ptr end = owner_->wait_for_end()) std::rethrow_exception(end);
    throw;
  }
}

std::vector<std::string> GenerationStore::full_keys(const std::vector<std::string>& keys) const {
  std::vector<std::string> full;
  for (const std::string& key : keys) full.push_back(prefix_ + key);
  return full;
}

c10::intrusive_ptr<c10d::Store> GenerationStore::clone() {
  return c10::make_intrusive<GenerationStore>(connect_, owner_, prefix_, getTimeout());
}

void GenerationStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask([&](membership::NetStore& client) { client.set(prefix_ + key, text_of_bytes(value)); });
}

std::vector<std::uint8_t> GenerationStore::compareSet(const std::string& key,
                                                      const std::vector<std::uint8_t>& expected,
                                                      const std::vector<std::uint8_t>& value) {
  return bytes_of_text(ask([&](membership::NetStore& client) {
    return client.compare_set(prefix_ + key, text_of_bytes(expected), text_of_bytes(value));
  }));
}

std::vector<std::uint8_t> GenerationStore::get(const std::string& key) {
  return multiGet({key}).front();
}

std::int64_t GenerationStore::add(const std::string& key, std::int64_t value) {
  return ask([&](membership::NetStore& client) { return client.add(prefix_ + key, value); });
}

bool GenerationStore::deleteKey(const std::string& key) {
  return ask([&](membership::NetStore& client) { return client.erase(prefix_ + key); });
}

bool GenerationStore::check(const std::vector<std::string>& keys) {
  return ask([&](membership::NetStore& client) { return client.has_all(full_keys(keys)); });
}

std::int64_t GenerationStore::getNumKeys() {
  C10_THROW_ERROR(NotImplementedError, "[elastic.store] the store of a generation does not count its keys");
}

void GenerationStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void GenerationStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  if (keys.empty()) return;
  ask([&](membership::NetStore& client) {
    const bool is_endless = timeout == kNoTimeout;
    const base::Deadline deadline = is_endless ? base::Deadline::never() : base::Deadline(timeout);
    if (client.wait(full_keys(keys), deadline)) return;
    // A deadline of the caller's may come before.
    const auto elapsed = std::chrono::duration_cast<milliseconds>(deadline.elapsed());
    const milliseconds waited = is_endless ? elapsed : std::min(elapsed, timeout);
    throw TimeoutError("elastic.store", base::concat("timed out: waited ", waited.count(),
                                                     " ms for the keys ", base::join(keys)));
  });
}

void GenerationStore::append(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask([&](membership::NetStore& client) { client.append(prefix_ + key, text_of_bytes(value)); });
}

std::vector<std::vector<std::uint8_t>> GenerationStore::multiGet(const std::vector<std::string>& keys) {
  if (keys.empty()) return {};
  wait(keys);
  std::vector<std::vector<std::uint8_t>> values;
  for (const std::string& value :
       ask([&](membership::NetStore& client) { return client.get_all(full_keys(keys)); })) {
    values.push_back(bytes_of_text(value));
  }
  return values;
}

void GenerationStore::multiSet(const std::vector<std::string>& keys,
                               const std::vector<std::vector<std::uint8_t>>& values) {
  if (keys.size() != values.size()) {
    throw UsageError("elastic.store",
                     base::concat("multiSet: got ", keys.size(), " keys and ", values.size(), " values"));
  }
  for (std::size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
}

}  // namespace cohort::elastic
