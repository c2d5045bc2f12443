// A process has one session: its link to its agent is one, and so is the state that it holds.
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/elastic/internal/net_session.h"
#include "cohort/elastic/session.h"
#include "cohort/membership/rank_link.h"

namespace cohort::elastic {
namespace {

std::shared_ptr<Session> session_with(const std::optional<SessionOptions>& options) {
  static std::mutex mutex;
  static std::weak_ptr<NetSession> session;
  static bool was_made = false;
  const std::lock_guard lock(mutex);
  if (auto existing = session.lock()) {
    if (!options || *options == existing->options()) return existing;
    throw UsageError("elastic.session", "the session of this process is there already, with other options",
                     "one session_of_process(options), before others ask for the session");
  }
  if (was_made) {
    throw UsageError("elastic.session", "the session of this process is destroyed, and a process has one",
                     "one elastic::run or Trainer::fit for each process that cohort run has started");
  }
  auto link = membership::RankLink::of_process();
  if (!link) return nullptr;
  const auto virtual_ranks = base::env_int("COHORT_VIRTUAL_RANKS", 1, 1 << 20);
  if (!virtual_ranks) {
    throw UsageError("elastic.session", "COHORT_AGENT_FD is set, and COHORT_VIRTUAL_RANKS is not",
                     "cohort run --elastic sets both");
  }
  const auto made = std::make_shared<NetSession>(*std::move(link), static_cast<int>(*virtual_ranks),
                                                 options.value_or(SessionOptions()));
  session = made;
  was_made = true;
  return made;
}

}  // namespace

std::shared_ptr<Session> session_of_process() {
  return session_with(std::nullopt);
}

std::shared_ptr<Session> session_of_process(const SessionOptions& options) {
  if (options.timeout <= std::chrono::milliseconds(0) || options.chunk_bytes == 0) {
    throw UsageError("elastic.session",
                     base::concat("timeout: got ", options.timeout.count(), " ms, chunk_bytes: got ",
                                  options.chunk_bytes, ", expected above 0"));
  }
  return session_with(options);
}

}  // namespace cohort::elastic
