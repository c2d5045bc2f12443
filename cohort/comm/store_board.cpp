#include "cohort/comm/store_board.h"

#include <algorithm>
#include <chrono>

#include "cohort/core/exception_text.h"

namespace cohort::comm {

using std::chrono::milliseconds;

bool says_timeout(const std::string& words) {
  return words.find("imed out") != std::string::npos || words.find("imeout") != std::string::npos;
}

bool StoreBoard::wait(const std::vector<std::string>& keys, core::Deadline deadline) {
  if (waits_ == nullptr) waits_ = store_->clone();
  try {
    waits_->wait(keys, milliseconds(std::max(1, deadline.remaining_ms())));
    return true;
  } catch (const std::exception& error) {
    if (says_timeout(core::message_of(error)) && deadline.expired()) return false;
    throw;
  }
}

std::vector<std::string> StoreBoard::get_all(const std::vector<std::string>& keys) {
  if (keys.empty() || !store_->hasExtendedApi()) return Board::get_all(keys);
  std::vector<std::string> values;
  for (const std::vector<std::uint8_t>& bytes : store_->multiGet(keys)) {
    values.emplace_back(bytes.begin(), bytes.end());
  }
  return values;
}

// A store that a file keeps does not forget.
void StoreBoard::remove(const std::string& key) {
  try {
    store_->deleteKey(key);
  } catch (const c10::NotImplementedError&) {
  }
}

}  // namespace cohort::comm
