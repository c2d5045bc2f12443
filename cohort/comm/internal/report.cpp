// Each rank sums up a group by one call: that which failed, else which it waits for, else which is under way,
// else the last. Answers travel as lines of fields, so a line that cannot be read spoils no other. The
// diagnosis compares positions: ranks below the highest position are behind, and ranks at it must have made
// the same call. Always: positions count only calls that every rank makes, so messages never put a rank
// behind.
#include "cohort/comm/internal/report.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"

namespace cohort::comm {
namespace {

using Clock = FlightEntry::Clock;
using Ranks = std::vector<int>;

std::int64_t whole_milliseconds(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
}

// How long it is in its state; for what failed, how long that took.
std::int64_t duration_of(const FlightEntry& entry) {
  return whole_milliseconds(entry.state == CallState::kFailed ? entry.since - entry.begun
                                                              : Clock::now() - entry.since);
}

// The call that a rank is at: what failed, else what it waits for, else what is under way, else the last.
const FlightEntry* current(const std::vector<FlightEntry>& entries) {
  for (const CallState state : {CallState::kFailed, CallState::kWaiting, CallState::kBegun}) {
    // The oldest in that state: later ones wait for it.
    const auto found = std::ranges::find(entries, state, &FlightEntry::state);
    if (found != entries.end()) return &*found;
  }
  return entries.empty() ? nullptr : &entries.back();
}

// Letters only, so that a line stays a line and a field a field.
std::string field(std::string text) {
  std::ranges::replace_if(text, [](char c) { return c == '\t' || c == '\n'; }, ' ');
  return text;
}

template <typename Number>
bool read(const std::string& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

// "waiting since 12 ms"; the state comes as its word, from another rank too.
std::string since(const std::string& state, std::int64_t duration_ms) {
  const bool done = state == to_string(CallState::kDone);
  const bool failed = state == to_string(CallState::kFailed);
  return base::concat(state, failed ? " after " : done ? " for " : " since ", duration_ms, " ms");
}

// What is wrong in one group: who is behind, who called something else.
std::string diagnosis(const std::string& group, const std::vector<Answer>& answers) {
  std::int64_t most = -1;
  for (const Answer& answer : answers) most = std::max(most, answer.position);
  std::map<std::string, Ranks> calls;  // of those that came furthest
  Ranks behind;
  for (const Answer& answer : answers) {
    if (answer.position == most) {
      // A message has position -1, so a rank that is at one is neither here nor behind.
      calls[answer.call].push_back(answer.rank);
    } else if (answer.call.empty() || answer.position >= 0) {
      behind.push_back(answer.rank);
    }
  }
  std::string text;
  if (!behind.empty()) {
    text += base::concat("\n", base::format_list("rank", behind), behind.size() == 1 ? " is" : " are",
                         " behind in group '", group, "'");
  }
  if (most >= 0 && calls.size() > 1) {
    base::TextList list("; ");
    for (const auto& [call, ranks] : calls) list.add(base::format_list("rank", ranks), ": ", call);
    text += base::concat("\nranks called different things in group '", group, "': ", list.text());
  }
  return text;
}

std::string table(const std::vector<std::array<std::string, 5>>& rows) {
  std::array<std::size_t, 5> width{};
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  base::TextList lines("\n");
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i)
      line += row[i] + std::string(width[i] - row[i].size() + 2, ' ');
    line.erase(line.find_last_not_of(' ') + 1);
    lines.add(line);
  }
  return lines.text();
}

std::string describe(const FlightEntry& entry) {
  return base::concat(entry.signature.text(), ": ", since(to_string(entry.state), duration_of(entry)),
                      entry.state == CallState::kDone
                          ? base::concat(", took ", whole_milliseconds(entry.since - entry.begun), " ms")
                          : "");
}

}  // namespace

std::string write_answers(const std::vector<Answer>& answers) {
  std::string text;
  for (const Answer& answer : answers) {
    text +=
        base::concat(answer.rank, '\t', answer.position, '\t', answer.milliseconds, '\t', field(answer.group),
                     '\t', field(answer.call), '\t', field(answer.state), '\t', field(answer.caller), '\n');
  }
  return text;
}

std::vector<Answer> read_answers(const std::string& text) {
  std::vector<Answer> answers;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::vector<std::string> fields;
    std::istringstream parts(line);
    for (std::string part; std::getline(parts, part, '\t');) fields.push_back(part);
    // A line that was cut has empty fields, and its numbers cannot be read.
    fields.resize(7);
    Answer answer{.group = fields[3], .call = fields[4], .state = fields[5], .caller = fields[6]};
    if (read(fields[0], answer.rank) && read(fields[1], answer.position) &&
        read(fields[2], answer.milliseconds)) {
      answers.push_back(std::move(answer));
    }
  }
  return answers;
}

std::vector<Answer> answers_of(GroupRegistry& registry) {
  std::vector<Answer> answers;
  for (const auto& group : registry.groups()) {
    Answer answer;
    answer.group = group->name;
    answer.rank = registry.rank;
    const std::vector<FlightEntry> entries = group->flight.last();
    if (const FlightEntry* entry = current(entries)) {
      answer.position = entry->position;
      answer.call = entry->signature.text();
      answer.state = to_string(entry->state);
      answer.milliseconds = duration_of(*entry);
      const std::vector<std::string> frames = name_frames(*entry);
      if (!frames.empty()) answer.caller = frames.front();
    }
    answers.push_back(std::move(answer));
  }
  return answers;
}

std::string join_answers(const std::vector<std::optional<std::vector<Answer>>>& answers) {
  std::map<std::string, std::vector<Answer>> groups;
  Ranks silent;
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    if (!answers[rank]) {
      silent.push_back(static_cast<int>(rank));
      continue;
    }
    for (const Answer& answer : *answers[rank]) groups[answer.group].push_back(answer);
  }
  std::vector<std::array<std::string, 5>> rows{{"rank", "group", "last call", "state", "called from"}};
  std::string diagnoses;
  for (const auto& [name, members] : groups) {
    for (const Answer& answer : members) {
      rows.push_back({std::to_string(answer.rank), name, answer.call.empty() ? "nothing yet" : answer.call,
                      answer.call.empty() ? "" : since(answer.state, answer.milliseconds), answer.caller});
    }
    diagnoses += diagnosis(name, members);
  }
  if (!silent.empty())
    diagnoses += base::concat("\n", base::format_list("rank", silent),
                              " did not answer: dead, stopped, or not watching");
  return table(rows) + diagnoses;
}

std::string report_of(GroupRegistry& registry) {
  base::TextList lines("\n");
  for (const auto& group : registry.groups()) {
    const std::vector<FlightEntry> entries = group->flight.last();
    lines.add("group '", group->name, "' (", group->backend, "), rank ", group->rank, "/", group->size,
              ", rank ", registry.rank, " of the job, ", group->calls.load(), " collectives");
    std::size_t shown = 0;
    for (const FlightEntry& entry : entries) {
      // The oldest eight: what else is under way waits for them.
      if (entry.state == CallState::kDone || ++shown > 8) continue;
      lines.add("  ", describe(entry));
      for (const std::string& frame : name_frames(entry)) lines.add("      ", frame);
    }
    const auto done = [](const FlightEntry& entry) { return entry.state == CallState::kDone; };
    const auto last = std::find_if(entries.rbegin(), entries.rend(), done);
    if (last != entries.rend()) lines.add("  last done: ", describe(*last));
  }
  return lines.text();
}

}  // namespace cohort::comm
