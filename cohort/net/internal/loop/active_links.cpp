#include "cohort/net/internal/loop/active_links.h"

#include <algorithm>

namespace cohort::net::node_detail {

void ActiveLinks::keep(const std::shared_ptr<Connection>& connection) {
  if (std::find(rings_.begin(), rings_.end(), connection) != rings_.end()) return;
  rings_.push_back(connection);
  ++connection->num_pollers;
  connection->shared->reader().wake();
}

bool ActiveLinks::let_all_sleep() {
  polls_sockets_ = false;
  std::erase_if(rings_, [](const auto& ring) { return let_sleep(*ring); });
  return rings_.empty();
}

// False where there are bytes to read, and the ring stays awake.
bool ActiveLinks::let_sleep(Connection& connection) {
  if (connection.num_pollers == 1 && !connection.is_closed && !connection.shared->reader().sleep())
    return false;
  --connection.num_pollers;
  return true;
}

void ActiveLinks::begin_polling(Connection& connection) {
  ++num_waiters_;
  ++connection.num_pollers;
  connection.shared ? connection.shared->reader().wake() : table_.update_interest(connection);
}

bool ActiveLinks::end_polling(const std::shared_ptr<Connection>& connection) {
  --num_waiters_;
  if (!connection->shared) {
    --connection->num_pollers;
    table_.update_interest(*connection);
    return false;
  }
  if (let_sleep(*connection)) return false;
  keep(connection);
  --connection->num_pollers;
  return true;
}

}  // namespace cohort::net::node_detail
