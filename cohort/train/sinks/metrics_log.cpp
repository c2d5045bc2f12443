// metrics.jsonl is what counts: metrics.csv is made from its epoch rows, and anew when a column is added.
// Reading keeps complete lines only, since a crash may cut off the last; both files agree after opening. A
// rewrite replaces the file as a whole, and rows are appended to the new file from then on.
#include "cohort/train/sinks/metrics_log.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "cohort/base/files/atomic_file.h"
#include "cohort/train/sinks/internal/append_file.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::ordered_json;

std::string json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char text[40];
  // The shortest text that reads back to the same double, whatever the locale.
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string json_line(const char* type, int64_t step, int64_t epoch, const MetricValues& values) {
  Json row = {{"type", type}, {"step", step}, {"epoch", epoch}};
  for (const auto& [name, value] : values) {
    // JSON has no NaN or infinity; null reads back as NaN. The CSV file distinguishes them.
    row[name] = std::isfinite(value) ? Json(value) : Json(nullptr);
  }
  return row.dump() + "\n";
}

/// A name goes into the header as it is, unless CSV would split it.
std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv_header(const std::vector<std::string>& columns) {
  std::string line = "epoch,step";
  for (const std::string& column : columns) line += "," + csv_cell(column);
  return line + "\n";
}

std::string csv_row(const std::vector<std::string>& columns, const MetricRow& row) {
  std::string line = std::to_string(row.epoch) + "," + std::to_string(row.step);
  for (const std::string& column : columns) {
    const std::optional<double> value = row.find(column);
    line += "," + (value ? json_number(*value) : std::string());
  }
  return line + "\n";
}

struct Line {
  std::string text;  ///< with its newline
  bool is_epoch = false;
  MetricRow row;
};

/// Returns the line that `text` is, or nothing when it was not written whole.
std::optional<Line> parse_line(const std::string& text) {
  // Without exceptions: a line that a crash cut off is expected, not an error.
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("type") || !json.contains("step") || !json.contains("epoch"))
    return {};
  if (!json["step"].is_number_integer() || !json["epoch"].is_number_integer()) return {};
  Line line{.text = text + "\n", .is_epoch = json["type"] == "epoch", .row = {}};
  line.row.step = json["step"].get<int64_t>();
  line.row.epoch = json["epoch"].get<int64_t>();
  for (const auto& [name, value] : json.items()) {
    if (name == "type" || name == "step" || name == "epoch") continue;
    if (value.is_null()) line.row.values.emplace_back(name, std::numeric_limits<double>::quiet_NaN());
    if (value.is_number()) line.row.values.emplace_back(name, value.get<double>());
  }
  return line;
}

/// Returns the whole lines of a file; a line without its newline was cut off by a crash.
std::vector<Line> read_lines(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<Line> lines;
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    if (auto line = parse_line(text.substr(begin, end - begin))) lines.push_back(std::move(*line));
  }
  return lines;
}

}  // namespace

std::optional<double> MetricRow::find(const std::string& name) const {
  for (const auto& [key, value] : values) {
    if (key == name) return value;
  }
  return std::nullopt;
}

struct MetricsLog::Files {
  explicit Files(const fs::path& folder)
      : jsonl_path(folder / "metrics.jsonl"), csv_path(folder / "metrics.csv") {}

  void add_columns(const MetricRow& row) {
    for (const auto& [name, value] : row.values) {
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
    }
  }

  /// metrics.csv holds `epochs`, no more and no less.
  void rewrite_csv() {
    csv.reset();
    std::string text = epochs.empty() ? "" : csv_header(columns);
    for (const MetricRow& row : epochs) text += csv_row(columns, row);
    base::write_file_atomically(csv_path, text);
    csv = std::make_unique<AppendFile>(csv_path);
  }

  void set_rows(const std::vector<Line>& lines) {
    epochs.clear();
    columns.clear();
    for (const Line& line : lines) {
      if (!line.is_epoch) continue;
      epochs.push_back(line.row);
      add_columns(line.row);
    }
  }

  /// metrics.jsonl holds `lines` only; metrics.csv follows.
  void rewrite(const std::vector<Line>& lines) {
    jsonl.reset();
    std::string text;
    for (const Line& line : lines) text += line.text;
    base::write_file_atomically(jsonl_path, text);
    jsonl = std::make_unique<AppendFile>(jsonl_path);
    set_rows(lines);
    rewrite_csv();
  }

  fs::path jsonl_path;
  fs::path csv_path;
  std::unique_ptr<AppendFile> jsonl;
  std::unique_ptr<AppendFile> csv;
  std::vector<std::string> columns;
  std::vector<MetricRow> epochs;
};

MetricsLog::MetricsLog(fs::path folder) : files_(std::make_unique<Files>(folder)) {
  if (fs::exists(files_->jsonl_path)) {
    // Drops a half-written last line, and brings metrics.csv in step if the crash fell between the two files.
    files_->rewrite(read_lines(files_->jsonl_path));
  } else {
    files_->jsonl = std::make_unique<AppendFile>(files_->jsonl_path);
    files_->rewrite_csv();
  }
}

MetricsLog::~MetricsLog() = default;

void MetricsLog::truncate_after(int64_t step, int64_t epochs) {
  std::vector<Line> lines = read_lines(files_->jsonl_path);
  std::erase_if(lines, [&](const Line& line) {
    // By epochs, as the row of an epoch comes after its last step, and may be missing where the checkpoint
    // was saved before.
    return line.is_epoch ? line.row.epoch > epochs : line.row.step > step;
  });
  files_->rewrite(lines);
}

void MetricsLog::write_step(int64_t step, int64_t epoch, const MetricValues& values) {
  files_->jsonl->write(json_line("step", step, epoch, values));
}

void MetricsLog::write_epoch(int64_t step, int64_t epoch, const MetricValues& values) {
  // The file that counts comes first: after a crash between the two, opening makes the other one anew.
  files_->jsonl->write(json_line("epoch", step, epoch, values));
  const MetricRow row{.epoch = epoch, .step = step, .values = values};
  const std::size_t columns_before = files_->columns.size();
  const bool first = files_->epochs.empty();
  files_->epochs.push_back(row);
  files_->add_columns(row);
  // A new column changes the header and so every line.
  if (first || files_->columns.size() != columns_before) {
    files_->rewrite_csv();
  } else {
    files_->csv->write(csv_row(files_->columns, row));
  }
}

const std::vector<MetricRow>& MetricsLog::epochs() const {
  return files_->epochs;
}

}  // namespace cohort::train
