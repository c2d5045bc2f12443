// all_gather_words(): rank 0 collects the words and leaves them as one text. If each rank read each word,
// requests would grow with the square of the ranks. Who is missing is found by halves: a half that is
// complete costs one request. StoreBarrier: each rank adds its own bit to a count, and whoever fills the last
// count releases all ranks. Always: a rank adds its bit once, so the sum never carries, and a count is the
// set of ranks that are here.
#include "cohort/base/key_value_store.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string_view>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"

namespace cohort::base {
namespace {

std::vector<std::string> keys_of(const std::string& prefix, int first, int end) {
  std::vector<std::string> keys;
  for (int rank = first; rank < end; ++rank) keys.push_back(concat(prefix, "/", rank));
  return keys;
}

// Those of [first, end) that have not set their key: few requests where few are missing.
void find_missing(KeyValueStore& kv_store, const std::string& prefix, int first, int end,
                  std::vector<int>& missing) {
  if (first == end || kv_store.has_all(keys_of(prefix, first, end))) return;
  if (end - first == 1) return missing.push_back(first);
  const int middle = first + (end - first) / 2;
  find_missing(kv_store, prefix, first, middle, missing);
  find_missing(kv_store, prefix, middle, end, missing);
}

// Words as one: each after its length and a colon.
std::string pack(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += concat(word.size(), ":", word);
  return text;
}

// Throws: CommError where it is no such text.
std::vector<std::string> unpack(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    std::size_t length = 0;
    const auto [next, error] = std::from_chars(text.data(), text.data() + text.size(), length);
    const auto at = static_cast<std::size_t>(next - text.data());
    if (error != std::errc() || at == text.size() || *next != ':' || text.size() - at - 1 < length) {
      throw CommError("base.store", "what rank 0 collected cannot be read",
                      "the same version of Cohort on all ranks, and a port that nobody else writes to");
    }
    words.emplace_back(text.substr(at + 1, length));
    text.remove_prefix(at + 1 + length);
  }
  return words;
}

}  // namespace

bool KeyValueStore::has_all(const std::vector<std::string>& keys) {
  return std::ranges::all_of(keys, [this](const std::string& key) { return has(key); });
}

bool KeyValueStore::wait(const std::vector<std::string>& keys, Deadline deadline) {
  return poll_for(*this, keys, deadline);
}

bool poll_for(KeyValueStore& kv_store, const std::vector<std::string>& keys, Deadline deadline) {
  return poll_until([&] { return kv_store.has_all(keys); }, deadline);
}

std::vector<std::string> KeyValueStore::get_all(const std::vector<std::string>& keys) {
  std::vector<std::string> values;
  for (const std::string& key : keys) values.push_back(get(key));
  return values;
}

std::vector<int> missing_ranks(KeyValueStore& kv_store, const std::string& prefix, int size,
                               Deadline deadline) {
  std::vector<int> missing;
  if (!kv_store.wait(keys_of(prefix, 0, size), deadline)) find_missing(kv_store, prefix, 0, size, missing);
  return missing;
}

Words all_gather_words(KeyValueStore& kv_store, const std::string& key, int rank, int size,
                       const std::string& word, Deadline deadline) {
  const std::string all = key + "/all";
  Words words;
  if (rank == 0) {
    // The others' words are under their ranks. Key 0 says that rank 0 has come: its deadline may be later
    // than theirs.
    kv_store.set(concat(key, "/", rank), "");
    const std::vector<std::string> keys = keys_of(key, 1, size);
    if (!kv_store.wait(keys, deadline)) find_missing(kv_store, key, 1, size, words.missing);
    if (words.missing.empty()) {
      words.of_rank = kv_store.get_all(keys);
      words.of_rank.insert(words.of_rank.begin(), word);
    }
    kv_store.set(all, words.missing.empty() ? "+" + pack(words.of_rank) : "-" + join(words.missing, ","));
    return words;
  }
  kv_store.set(concat(key, "/", rank), word);
  if (!kv_store.wait({all}, deadline.later(kCollectTime))) {
    find_missing(kv_store, key, 0, size, words.missing);
    if (words.missing.empty()) words.missing.push_back(0);  // it has come, and does not continue
    return words;
  }
  const std::string text = kv_store.get(all);
  if (text.starts_with('+')) {
    words.of_rank = unpack(std::string_view(text).substr(1));
    if (words.of_rank.size() == static_cast<std::size_t>(size)) return words;
    throw CommError("base.store",
                    concat("rank 0 collected ", words.of_rank.size(), " words of ", size, " ranks"));
  }
  const char* at = text.data() + std::min<std::size_t>(1, text.size());
  const char* const end = text.data() + text.size();
  for (int who = 0; at < end; ++at) {
    const auto [next, error] = std::from_chars(at, end, who);
    if (error == std::errc() && who >= 0 && who < size) words.missing.push_back(who);
    at = std::max(at, next);
  }
  if (words.missing.empty()) words.missing.push_back(0);
  return words;
}

void remove_word(KeyValueStore& kv_store, const std::string& key, int rank) {
  kv_store.remove(concat(key, "/", rank));
  if (rank == 0) kv_store.remove(key + "/all");
}

std::int64_t StoreBarrier::all_of(int word) const {
  return (std::int64_t{1} << std::min(kBits, size_ - word * kBits)) - 1;
}

std::string StoreBarrier::key_of(int word) const {
  return concat(key_, "/", word);
}

// A bit each, so that a count says who is there.
void StoreBarrier::arrive() {
  const int word = rank_ / kBits;
  if (kv_store_.add(key_of(word), std::int64_t{1} << rank_ % kBits) != all_of(word)) return;
  // This word is full, and others may not be: the last one to become full releases all ranks.
  if (num_words() > 1 && kv_store_.add(key_ + "/full", 1) != num_words()) return;
  kv_store_.set(key_ + "/open", "1");
  is_released_ = true;
}

bool StoreBarrier::wait(Deadline deadline) {
  if (!is_released_) is_released_ = kv_store_.wait({key_ + "/open"}, deadline);
  return is_released_;
}

void StoreBarrier::release_all() {
  kv_store_.set(key_ + "/open", "1");
}

std::vector<int> StoreBarrier::missing() {
  std::vector<int> ranks;
  for (int word = 0; word < num_words(); ++word) {
    // To add 0 reads the count, also where nobody has added to it.
    const std::int64_t here = kv_store_.add(key_of(word), 0);
    for (int bit = 0; bit < kBits && word * kBits + bit < size_; ++bit) {
      if ((here >> bit & 1) == 0) ranks.push_back(word * kBits + bit);
    }
  }
  return ranks;
}

void StoreBarrier::remove() {
  for (int word = 0; word < num_words(); ++word) kv_store_.remove(key_of(word));
  if (num_words() > 1) kv_store_.remove(key_ + "/full");
  kv_store_.remove(key_ + "/open");
}

}  // namespace cohort::base
