// A line is a list of parts, each with an importance; the least important go until the line fits. The bar
// takes the columns that are left. The newest numbers are kept, and drawn at most at a set interval. A line
// that stays is written where the bar was, and the bar is drawn again below it.
#include "cohort/train/sinks/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/choice.h"
#include "cohort/base/text/format_list.h"

namespace cohort::train {
namespace {

using base::concat;

std::string format_number(const char* format, double value) {
  std::array<char, 48> text;
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string rate_text(double rate) {
  return format_number(rate < 10 ? "%.1f" : "%.0f", rate) + " samples/s";
}

std::string percent(double share, const char* format) {
  return format_number(format, 100 * share) + "%";
}

/// The bar's `cells` cells, filled to `share` in eighths of a cell.
std::string bar_text(double share, int cells, bool unicode) {
  static constexpr std::array<const char*, 8> kEighths = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int steps = unicode ? 8 : 1;
  const int filled = static_cast<int>(std::clamp(share, 0.0, 1.0) * cells * steps);
  std::string text;
  for (int i = 0; i < cells; ++i) {
    const int part = std::clamp(filled - i * steps, 0, steps);
    if (part == steps) {
      text += unicode ? "█" : "#";
    } else {
      text += unicode ? kEighths[static_cast<std::size_t>(part)] : "-";
    }
  }
  return unicode ? "│" + text + "│" : "[" + text + "]";
}

std::string counter(const char* name, int64_t value, int64_t total) {
  return total > 0 ? concat(name, value, "/", total) : concat(name, value);
}

/// Columns of a text in UTF-8, all of whose characters are one column wide.
int columns(const std::string& text) {
  return static_cast<int>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

bool terminal_speaks_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    // POSIX's order: LC_ALL, then the category, then LANG; an empty one counts as not set.
    if (value == nullptr || *value == '\0') continue;
    const std::string text = value;
    return text.find("UTF-8") != std::string::npos || text.find("utf8") != std::string::npos;
  }
  return false;
}

int terminal_width(int descriptor) {
  winsize size{};
  // Asked for each drawing, since a window may change its size.
  return ::ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

std::string format_duration(double seconds) {
  // Before the first measurement there is no estimate.
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e9) return "-";
  const auto total = static_cast<long long>(std::llround(seconds));
  std::array<char, 48> text;
  if (total >= 3600) {
    std::snprintf(text.data(), text.size(), "%lld:%02lld:%02lld", total / 3600, total / 60 % 60, total % 60);
  } else {
    std::snprintf(text.data(), text.size(), "%lld:%02lld", total / 60, total % 60);
  }
  return text.data();
}

std::string format_bytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (value >= 1073741824.0) return format_number("%.1f GiB", value / 1073741824.0);
  if (value >= 1048576.0) return format_number("%.0f MiB", value / 1048576.0);
  return format_number("%.0f KiB", value / 1024.0);
}

std::string progress_bar_line(const ProgressNumbers& n, int width, bool unicode) {
  struct LineItem {
    std::string text;
    int importance;  // the lowest goes first when the line is too long
  };
  std::vector<LineItem> parts;
  const std::string head =
      concat(n.phase == "train" ? "" : n.phase + " ", counter("epoch ", n.epoch, n.epochs));
  parts.push_back({head, 100});
  constexpr int kBar = 1;  // its place in `parts`
  // The importance marks the bar, whose text is made last, when it is known how many columns are left.
  parts.push_back({"", 40});
  parts.push_back({counter("", n.step, n.steps), 80});
  if (n.loss) parts.push_back({"loss " + format_number("%.4f", *n.loss), 90});
  if (n.accuracy) parts.push_back({"acc " + percent(*n.accuracy, "%.2f"), 85});
  if (n.samples_per_second) parts.push_back({rate_text(*n.samples_per_second), 70});
  if (n.data_wait) parts.push_back({"wait " + percent(*n.data_wait, "%.1f"), 50});
  if (n.memory_bytes) parts.push_back({format_bytes(*n.memory_bytes), 30});
  if (n.seconds_left) parts.push_back({format_duration(*n.seconds_left) + " left", 75});

  const auto length = [&] {
    int sum = -2;
    // At least 8 cells, the two edges and the two blanks before the next part.
    for (const LineItem& part : parts) sum += part.importance == 40 ? 12 : columns(part.text) + 2;
    return sum;
  };
  bool has_bar = n.steps > 0;
  if (!has_bar) parts.erase(parts.begin() + kBar);
  while (parts.size() > 1 && length() > width) {
    const auto least = std::min_element(parts.begin(), parts.end(), [](const LineItem& a, const LineItem& b) {
      return a.importance < b.importance;
    });
    has_bar = has_bar && least->importance != 40;
    parts.erase(least);
  }
  if (has_bar) {
    const int cells = std::clamp(8 + width - length(), 8, 28);
    parts[kBar].text = bar_text(static_cast<double>(n.step) / static_cast<double>(n.steps), cells, unicode);
  }
  base::TextList items("  ");
  for (const LineItem& part : parts) items.add(part.text);
  const std::string& line = items.text();
  // A terminal narrower than the first part: cut, as a line that wraps cannot be drawn over.
  return columns(line) <= width ? line : line.substr(0, static_cast<std::size_t>(std::max(0, width)));
}

std::string progress_plain_line(const ProgressNumbers& n) {
  std::string line =
      concat(n.phase, counter(" epoch ", n.epoch, n.epochs), counter(" step ", n.step, n.steps));
  if (n.loss) line += "  loss " + format_number("%.4f", *n.loss);
  if (n.accuracy) line += "  accuracy " + percent(*n.accuracy, "%.2f");
  if (n.lr) line += "  lr " + format_number("%.4g", *n.lr);
  if (n.samples_per_second) line += "  " + rate_text(*n.samples_per_second);
  if (n.data_wait) line += "  data wait " + percent(*n.data_wait, "%.1f");
  if (n.memory_bytes) line += "  memory " + format_bytes(*n.memory_bytes);
  if (n.seconds_left) line += "  left " + format_duration(*n.seconds_left);
  return line;
}

ProgressMode progress_mode(const std::string& name) {
  constexpr base::Choice<ProgressMode> kModes[] = {{"auto", ProgressMode::kAuto},
                                                   {"bar", ProgressMode::kBar},
                                                   {"plain", ProgressMode::kPlain},
                                                   {"off", ProgressMode::kOff}};
  return base::choose<ConfigError>("train.progress", "run.progress", name, kModes);
}

struct Progress::State {
  void put(const std::string& text) {
    // A terminal that went away must not end a run: what cannot be shown is not shown.
    std::fwrite(text.data(), 1, text.size(), options.out);
    std::fflush(options.out);
  }
  std::string take_bar_away() {
    if (!drawn) return "";
    drawn = false;
    return "\r\x1b[2K\x1b[?25h";  // line empty, cursor back
  }
  void draw() {
    // One write of the whole line over the old one, then what is left of it: nothing flickers. The last
    // column stays free: some terminals wrap as soon as it is written.
    const int width = terminal_width(::fileno(options.out)) - 1;
    put(concat(drawn ? "" : "\x1b[?25l", "\r", progress_bar_line(last, width, unicode), "\x1b[K"));
    drawn = true;
  }

  ProgressOptions options;
  ProgressMode mode = ProgressMode::kPlain;
  bool unicode = false;
  bool drawn = false;
  ProgressNumbers last;
  std::optional<std::chrono::steady_clock::time_point> drawn_at;
  std::mutex mutex;
};

Progress::Progress(ProgressOptions options) : state_(std::make_unique<State>()) {
  state_->options = options;
  state_->mode = options.mode;
  if (options.mode == ProgressMode::kAuto) {
    const char* terminal = std::getenv("TERM");
    const bool moves =
        ::isatty(::fileno(options.out)) == 1 && terminal != nullptr && std::string(terminal) != "dumb";
    state_->mode = moves ? ProgressMode::kBar : ProgressMode::kPlain;
  }
  state_->unicode = terminal_speaks_utf8();
}

Progress::~Progress() {
  clear();
}

void Progress::update(const ProgressNumbers& numbers) {
  // Log lines of other threads come through print() meanwhile.
  const std::lock_guard lock(state_->mutex);
  const auto& options = state_->options;
  if (state_->mode == ProgressMode::kPlain) {
    const bool due = options.log_every > 0 && numbers.step > 0 && numbers.step % options.log_every == 0;
    if (due) state_->put(progress_plain_line(numbers) + "\n");
    return;
  }
  if (state_->mode != ProgressMode::kBar) return;
  state_->last = numbers;
  const auto now = std::chrono::steady_clock::now();
  // The last step of an epoch is always drawn, so that the bar is seen full.
  const bool is_last = numbers.steps > 0 && numbers.step == numbers.steps;
  if (state_->drawn_at && now - *state_->drawn_at < options.min_interval && !is_last) return;
  state_->drawn_at = now;
  state_->draw();
}

void Progress::print(std::string_view line) {
  const std::lock_guard lock(state_->mutex);
  if (state_->mode == ProgressMode::kOff) return;
  const bool redraw = state_->drawn;
  state_->put(concat(state_->take_bar_away(), line, "\n"));
  if (redraw) state_->draw();
}

void Progress::clear() {
  const std::lock_guard lock(state_->mutex);
  const std::string text = state_->take_bar_away();
  if (!text.empty()) state_->put(text);
}

bool Progress::is_bar() const {
  return state_->mode == ProgressMode::kBar;
}

}  // namespace cohort::train
