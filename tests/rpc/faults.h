#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "cohort/base/key_value_store.h"
#include "cohort/rpc/agent.h"
#include "tests/support/comes_true.h"
#include "tests/support/temp_dir.h"

/// What the tests of faults share: docs/design/rpc.md, "What can go wrong".
namespace cohort::test {

/// How often a test injects its fault: scripts/test_slow asks for ten.
inline int num_faults() {
  const char* const text = std::getenv("COHORT_FAULTS");
  return text == nullptr ? 1 : std::atoi(text);
}

/// Options of agents over "tcp", "tls" (the caller gives certificates), or "local" sockets.
inline rpc::AgentOptions options_over(const std::string& transport) {
  rpc::AgentOptions options;
  options.listen = transport == "local" ? "auto" : "127.0.0.1:0";
  return options;
}
inline std::string name_of_transport(const ::testing::TestParamInfo<const char*>& info) {
  return info.param;
}

/// Whether nothing is left, within 20 s: no call, reference, object or context, and nothing on its way to
/// another worker.
inline ::testing::AssertionResult has_nothing_left(const rpc::Agent& agent) {
  rpc::AgentMetrics left;
  const bool is_empty = comes_true([&] {
    left = agent.metrics();
    return left.calls_pending + left.calls_unanswered + left.handlers_queued + left.references +
               left.objects.size() + left.contexts + left.bytes_on_the_way + left.messages_queued ==
           0;
  });
  if (is_empty) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << agent.self().name << " has " << left.calls_pending << " calls, " << left.calls_unanswered
         << " handlers, of which " << left.handlers_queued << " are queued, " << left.references
         << " references, " << left.objects.size() << " objects, " << left.contexts << " contexts; "
         << left.bytes_on_the_way << " bytes are on the way and " << left.messages_queued << " messages wait";
}

/// The store of a job whose workers are processes of this host: a file for each key. Takes no descriptor
/// between calls.
class FolderStore : public base::KeyValueStore {
 public:
  explicit FolderStore(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override {
    const std::filesystem::path path = path_of(key);
    const std::filesystem::path unfinished = path.string() + " of process " + std::to_string(::getpid());
    write_file(unfinished, value);
    std::filesystem::rename(unfinished, path);
  }
  bool has(const std::string& key) override { return std::filesystem::exists(path_of(key)); }
  std::string get(const std::string& key) override { return read_file(path_of(key)); }
  /// By one process at a time.
  std::int64_t add(const std::string& key, std::int64_t value) override {
    const std::int64_t sum = (has(key) ? std::stoll(get(key)) : 0) + value;
    set(key, std::to_string(sum));
    return sum;
  }

 private:
  std::filesystem::path path_of(std::string key) const {
    std::replace(key.begin(), key.end(), '/', ' ');
    return folder_ / ("key " + key);
  }

  const std::filesystem::path folder_;
};

}  // namespace cohort::test
