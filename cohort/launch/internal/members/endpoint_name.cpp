#include "cohort/launch/internal/members/endpoint_name.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/threads/run_detached.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/threads/wait_for_listener.h"

namespace cohort::launch {
namespace {

using base::concat;
using std::chrono::milliseconds;

constexpr milliseconds kTryPause(100);
constexpr auto kQuietTime = std::chrono::seconds(5);  // agents rarely start at the same moment

}  // namespace

bool wait_for_endpoint_name(const std::string& host, base::Deadline deadline,
                            const std::function<bool()>& interrupted,
                            const std::function<std::string(const std::string&)>& find_way) {
  if (base::is_this_host(host)) return true;
  const base::Deadline quiet{kQuietTime};
  bool is_logged = false;
  std::string why = "nobody tried";
  base::Future<std::string> asked;  // a name server that is silent would hold up this thread
  while (!interrupted()) {
    if (!asked.valid())
      asked = base::run_detached("the endpoint's address", [host, find_way] { return find_way(host); });
    const base::Deadline next(kTryPause);
    if (asked.wait(next)) {
      try {
        asked.get(next);
        return true;
      } catch (const std::exception& error) {
        why = base::message_of(error);
      }
      asked = {};
      base::sleep(kTryPause, deadline);
    } else {
      why = concat("no server has answered yet to which address ", host, " has");
    }
    if (deadline.expired()) {
      const auto waited = std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count();
      throw RendezvousError(
          "launch.run",
          concat("the rendezvous endpoint ", host, " was not found (waited ", waited, " ms): ", why),
          "--rdzv-endpoint HOST:PORT with a host that this one can reach; --rdzv-conf "
          "join_timeout=SECONDS waits longer");
    }
    if (quiet.expired() && !std::exchange(is_logged, true)) {
      base::log_info(concat("waiting for the rendezvous endpoint ", host, " (", why, ")"));
    }
  }
  return false;
}

}  // namespace cohort::launch
