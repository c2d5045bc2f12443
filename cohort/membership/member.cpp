#include "cohort/membership/member.h"

#include <utility>

#include "cohort/membership/internal/member_loop.h"

namespace cohort::membership {

Member::Member(MemberOptions options)
    : loop_(std::make_shared<member_detail::MemberLoop>(std::move(options))) {
  loop_->start();
}
Member::~Member() {
  loop_->stop();
}

void Member::set_status(MemberStatus status) {
  loop_->set_status(std::move(status));
}
void Member::note_alive() {
  loop_->note_alive();
}
MemberView Member::view() const {
  return loop_->view();
}
bool Member::wait_for_change(std::uint64_t seen, base::Deadline deadline) const {
  return loop_->wait_for_change(seen, deadline);
}
const std::string& Member::incarnation() const {
  return loop_->incarnation();
}
const std::string& Member::address() const {
  return loop_->address();
}
void Member::close(base::Deadline deadline) {
  loop_->close(deadline);
}

}  // namespace cohort::membership
