#include "cohort/launch/internal/members/member_agent.h"

#include <string>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/launch/internal/rank_signals.h"

namespace cohort::launch {
namespace {

constexpr auto kReaderTime = std::chrono::minutes(10);  // a reader such as less may take its time

}  // namespace

MemberAgent::MemberAgent(const RunOptions& options, MemberLink& member, const AgentParts& parts)
    : options_(options), member_(member), parts_(parts), leave_(options, member, output_) {}

int MemberAgent::run() {
  if (parts_.folder.stays()) {
    output_.log(base::LogLevel::kInfo,
                base::concat("output of ranks is kept in ", parts_.folder.path().string()));
  }
  try {
    while (!is_over()) {
      wait();
      handle_signals();
      leave_.look_for_notice();
      follow();
    }
    const int status = finish();
    output_.flush(base::Deadline(kReaderTime), [&] {
      handle_signals();
      return leave_.has_begun();
    });
    return status;
  } catch (...) {
    output_.flush(base::Deadline(std::chrono::seconds(1)));
    throw;
  }
}

void MemberAgent::handle_signals() {
  while (const int number = parts_.signals.take()) {
    if (!pass_rank_signal(number, ranks(), output_)) leave_.receive(number);
  }
}

bool MemberAgent::take_news() {
  if (!member_.update()) return false;
  const std::string wait = member_.new_wait();
  if (!wait.empty()) output_.log(base::LogLevel::kInfo, "this node " + wait);
  return true;
}

}  // namespace cohort::launch
