// Events are sorted so that a call stands before what it contains; a stack then tells what is within what. A
// call's own time is its length less that of the calls directly in it. Calls within themselves count once in
// the total. GPU work is given to the call that started it, which is known because threads are sorted before
// GPUs.
#include "cohort/bench/internal/profile_events.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/timeline.h"
#include "cohort/bench/timeit.h"

namespace cohort::bench::detail {
namespace {

constexpr std::int64_t kFirstRow = 1 << 25;  // rows of operators, above the timeline's own numbers

std::string json_text(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string about_row(const char* what, std::int64_t row, const std::string& args) {
  return base::concat(R"(,{"ph":"M","name":")", what, R"(","pid":)", ::getpid(), R"(,"tid":)", row,
                      R"(,"args":{)", args, "}}\n");
}

std::string row_name(const Event& event) {
  if (event.gpu >= 0) return base::concat("GPU ", event.gpu, ", stream ", event.row);
  const std::string thread = base::Timeline::thread_name(static_cast<int>(event.row));
  return "operators of " + (thread.empty() ? "thread " + std::to_string(event.row) : thread);
}

}  // namespace

void sort(std::vector<Event>& events) {
  const auto key = [](const Event& event) {
    // Of two that begin together, the longer one contains the other and comes first.
    return std::make_tuple(event.gpu, event.row, event.begin, -event.end);
  };
  std::sort(events.begin(), events.end(), [&](const Event& a, const Event& b) { return key(a) < key(b); });
}

std::vector<OperatorRow> rows_of(const std::vector<Event>& events) {
  std::map<std::pair<std::string, std::string>, OperatorRow> rows;
  std::unordered_map<std::uint64_t, OperatorRow*> by_call;
  std::vector<const Event*> stack;  // the calls around the current one
  const auto row_for = [&](const std::string& name, const std::string& shapes) -> OperatorRow& {
    OperatorRow& row = rows[{name, shapes}];
    row.name = name;
    row.shapes = shapes;
    return row;
  };
  for (const Event& event : events) {
    const std::chrono::nanoseconds length(event.end - event.begin);
    if (event.gpu >= 0) {
      const auto call = by_call.find(event.started_by);
      // A library may start work outside of any operator.
      OperatorRow& row = call == by_call.end() ? row_for("(started by no operator)", "") : *call->second;
      row.gpu += length;
      continue;
    }
    while (!stack.empty() && (stack.back()->row != event.row || stack.back()->end <= event.begin)) {
      stack.pop_back();
    }
    OperatorRow& row = row_for(event.name, event.shapes);
    ++row.calls;
    // Calls within it take their time off again when they are met.
    row.self += length;
    const bool within_itself = std::any_of(stack.begin(), stack.end(), [&](const Event* outer) {
      return outer->name == event.name && outer->shapes == event.shapes;
    });
    // Without this, a recursive operator would have more than all the time.
    if (!within_itself) row.total += length;
    if (!stack.empty()) row_for(stack.back()->name, stack.back()->shapes).self -= length;
    // A map's rows do not move, so the pointer stays good.
    if (event.id != 0) by_call[event.id] = &row;
    stack.push_back(&event);
  }
  std::vector<OperatorRow> result;
  for (auto& [key, row] : rows) result.push_back(std::move(row));
  // By GPU first: where there is one, the time of a host's call is mostly waiting.
  std::stable_sort(result.begin(), result.end(), [](const OperatorRow& a, const OperatorRow& b) {
    return std::tie(a.gpu, a.self) > std::tie(b.gpu, b.self);
  });
  return result;
}

std::string trace_of(const std::vector<Event>& events, std::int64_t zero) {
  std::map<std::pair<int, std::int64_t>, std::int64_t> rows;
  std::string text;
  for (const Event& event : events) {
    const auto index = static_cast<std::int64_t>(rows.size());
    const auto [row, is_new] = rows.try_emplace({event.gpu, event.row}, kFirstRow + index);
    if (!is_new) continue;
    text += about_row("thread_name", row->second, R"("name":)" + json_text(row_name(event)));
    text += about_row("thread_sort_index", row->second, base::concat(R"("sort_index":)", 2 * index + 2));
    // Even numbers for operators and odd ones for threads: each thread's operators stand right below it.
    if (event.gpu < 0) {
      text += about_row("thread_sort_index", event.row, base::concat(R"("sort_index":)", 2 * index + 1));
    }
  }
  std::array<char, 160> numbers{};
  for (const Event& event : events) {
    std::snprintf(numbers.data(), numbers.size(), R"(,"pid":%d,"tid":%lld,"ts":%.3f,"dur":%.3f)", ::getpid(),
                  static_cast<long long>(rows.at({event.gpu, event.row})),
                  static_cast<double>(event.begin - zero) / 1e3,
                  static_cast<double>(event.end - event.begin) / 1e3);
    text += base::concat(R"(,{"ph":"X","cat":")", event.gpu < 0 ? "operator" : "gpu", R"(","name":)",
                         json_text(event.name), numbers.data());
    if (!event.shapes.empty()) text += R"(,"args":{"shapes":)" + json_text(event.shapes) + "}";
    text += "}\n";
  }
  return text;
}

std::string table_of(const std::vector<OperatorRow>& rows, std::int64_t steps, std::chrono::nanoseconds wall,
                     std::size_t max_rows) {
  OperatorRow all, rest;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (OperatorRow* sum : {&all, i >= max_rows ? &rest : nullptr}) {
      if (sum == nullptr) continue;
      sum->calls += rows[i].calls;
      sum->self += rows[i].self;
      sum->gpu += rows[i].gpu;
    }
  }
  const bool gpu = all.gpu.count() > 0;
  const auto per = [](std::chrono::nanoseconds time, std::int64_t number) {
    return to_text(std::chrono::duration<double>(time).count() / static_cast<double>(number));
  };
  std::array<char, 192> line{};
  const auto add = [&](const std::string& name, const std::string& calls, const std::string& self,
                       const std::string& share, const std::string& total, const std::string& one_call,
                       const std::string& on_gpu) {
    std::snprintf(line.data(), line.size(), "%-44s %9s %11s %7s %11s %11s", name.c_str(), calls.c_str(),
                  self.c_str(), share.c_str(), total.c_str(), one_call.c_str());
    std::string text = line.data();
    if (gpu) text += std::string(on_gpu.size() < 12 ? 12 - on_gpu.size() : 1, ' ') + on_gpu;
    return text;
  };
  std::string text =
      add("operator, times per step", "calls", "self", "share", "total", "one call", "GPU") + "\n";
  for (std::size_t i = 0; i < std::min(rows.size(), max_rows); ++i) {
    const OperatorRow& row = rows[i];
    std::array<char, 32> calls{}, share{};
    std::snprintf(calls.data(), calls.size(), "%.4g",
                  static_cast<double>(row.calls) / static_cast<double>(steps));
    std::snprintf(share.data(), share.size(), "%5.1f %%",
                  all.self.count() > 0
                      ? 100 * static_cast<double>(row.self.count()) / static_cast<double>(all.self.count())
                      : 0.0);
    text += add(row.name.size() > 44 ? row.name.substr(0, 41) + "..." : row.name, calls.data(),
                per(row.self, steps), share.data(), per(row.total, steps),
                row.calls > 0 ? per(row.total, row.calls) : "", per(row.gpu, steps));
    text += (row.shapes.empty() ? "" : "  " + row.shapes) + "\n";
  }
  if (rows.size() > max_rows) {
    text += base::concat(rows.size() - max_rows, " more operators: ", rest.calls, " calls, ",
                         per(rest.self, steps), " of their own",
                         gpu ? ", " + per(rest.gpu, steps) + " on GPUs" : "", "\n");
  }
  return text + base::concat(steps, steps == 1 ? " step" : " steps", ", ", per(wall, steps),
                             " each by wall clock, ", per(all.self, steps), " of it in operators",
                             gpu ? ", " + per(all.gpu, steps) + " of work on GPUs" : "", "\n");
}

}  // namespace cohort::bench::detail
