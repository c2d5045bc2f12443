#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "cohort/base/secret.h"

namespace cohort::launch {

/// The words that agents leave for each other on a store that anybody may write to. Each carries a code that
/// only who has the job's secret can make, of the session, the key, a number and the word: a word from
/// elsewhere, from another job, from another key, or older than the last one under its key is none.
///
/// A session begins with a word that node 0 chooses (AgentStoreClient::begin_session). A node knows that it
/// is of this job, and no record of an earlier one, when node 0 repeats a word of the node's own choice in
/// it.
///
/// Without a secret words are what they are, and everybody is believed. Threads: one caller at a time.
class SignedWords {
 public:
  explicit SignedWords(const std::optional<base::Secret>& secret)
      : secret_(secret ? std::optional(secret->derive("agents")) : std::nullopt) {}

  /// What is signed and opened from now on is of this session; before, of none.
  void begin_session(const std::string& session) { session_ = session; }
  bool is_in_session() const { return !session_.empty(); }

  /// What to leave under `key`. Each call has a number of its own, larger than those before.
  std::string sign(const std::string& key, const std::string& word);
  /// The word in what was found under `key`; nothing when it is none of this job's.
  std::optional<std::string> open(const std::string& key, const std::string& found);

 private:
  std::string text_of(const std::string& key, std::string_view rest) const;

  std::optional<base::Secret> secret_;
  std::string session_;
  std::uint64_t number_ = 0;
  std::map<std::string, std::uint64_t> last_;  // the number of the last word that was opened, by key
};

}  // namespace cohort::launch
