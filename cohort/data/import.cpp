// Making image folders of what people have: archives, and flat folders with a list.
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "cohort/core/error.h"
#include "cohort/data/partial_folder.h"
#include "cohort/data/tools.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;
constexpr const char* kWhere = "data.tools";

DataError file_and_folder(const std::string& archive, const fs::path& entry) {
  return {kWhere,
          core::concat(archive, ": entry '", entry.string(),
                       "' clashes with another: a file and a folder have one name"),
          "an archive without it"};
}

void make_folders(const fs::path& path, const std::string& archive, const fs::path& entry) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return;
  if (error == std::errc::not_a_directory || error == std::errc::file_exists)
    throw file_and_folder(archive, entry);
  throw SystemError(kWhere, core::concat("cannot make ", path.string(), ": ", error.message()));
}

// Returns the length of the file.
std::int64_t write_entry(TarReader& reader, const fs::path& target) {
  std::ofstream file(target, std::ios::binary);
  const std::int64_t length = reader.read_content([&](std::int64_t offset, std::span<const std::byte> bytes) {
    file.seekp(offset);  // sparse files have holes
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  });
  file.close();
  std::error_code error;
  if (file) fs::resize_file(target, static_cast<std::uintmax_t>(length), error);  // a hole at the end
  if (!file || error) {
    throw SystemError(kWhere, core::concat("cannot write ", target.string(), ": ", std::strerror(errno)),
                      "check the space left");
  }
  return length;
}

// One line of a list, split at commas; a field in quotes may hold commas and doubled quotes.
std::vector<std::string> split_csv(const std::string& line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (c == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"') {
      fields.back() += line[++i];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

// The file and label of a line; nothing for an empty line and for a heading.
std::optional<std::pair<fs::path, std::string>> parse_line(std::string line, bool first,
                                                           const std::string& at) {
  if (!line.empty() && line.back() == '\r') line.pop_back();
  if (line.empty()) return std::nullopt;
  std::vector<std::string> fields = split_csv(line);
  for (std::string& field : fields) {  // "file, label": a folder's name must not begin with a space
    field.erase(0, std::min(field.find_first_not_of(" \t"), field.size()));
    field.erase(field.find_last_not_of(" \t") + 1);
  }
  if (fields.size() != 2 || fields[0].empty() || fields[1].empty()) {
    throw DataError(kWhere, core::concat(at, ": got '", line, "', expected file,label"));
  }
  if (first && fields[0] == "file" && fields[1] == "label") return std::nullopt;
  const fs::path file = fields[0];
  const fs::path inside = file.lexically_normal();
  if (file.is_absolute() || *inside.begin() == "..") {
    throw DataError(kWhere, core::concat(at, ": file '", fields[0], "' is not inside the folder"));
  }
  if (fields[1] == "." || fields[1] == ".." || fields[1].find('/') != std::string::npos) {
    throw DataError(kWhere, core::concat(at, ": label '", fields[1], "' cannot be a folder's name"));
  }
  return std::pair(inside, fields[1]);
}

}  // namespace

MadeFolder unpack_tar(const std::string& archive, const std::string& folder, const TarOptions& options) {
  TarReader reader(archive, options);
  PartialFolder made(folder);
  MadeFolder result;
  while (const auto entry = reader.next()) {
    const fs::path target = made.path() / entry->path;
    if (entry->is_folder) {
      make_folders(target, archive, entry->path);
      continue;
    }
    make_folders(target.parent_path(), archive, entry->path);
    if (fs::is_directory(target)) throw file_and_folder(archive, entry->path);
    result.bytes += write_entry(reader, target);
    ++result.files;
  }
  if (result.files == 0) throw DataError(kWhere, archive + " holds no files");
  made.finish();
  return result;
}

MadeFolder folder_from_list(const std::string& flat, const std::string& csv, const std::string& folder,
                            const LabelListOptions& options) {
  std::ifstream list(csv);
  if (!list) throw DataError(kWhere, "cannot open the list of labels " + csv);
  PartialFolder made(folder);
  MadeFolder result;
  std::string line;
  for (std::int64_t number = 1; std::getline(list, line); ++number) {
    const std::string at = core::concat(csv, ":", number);
    const auto parsed = parse_line(line, number == 1, at);
    if (!parsed) continue;
    const fs::path source = fs::path(flat) / parsed->first;
    const fs::path target = made.path() / parsed->second / parsed->first.filename();
    std::error_code error;
    fs::create_directory(target.parent_path(), error);
    if (fs::exists(target)) {
      throw DataError(kWhere, core::concat(at, ": label '", parsed->second, "' has a second file named ",
                                           target.filename().string()));
    }
    error.clear();
    if (options.link) fs::create_hard_link(source, target, error);
    if (!options.link || error) {
      error.clear();
      fs::copy_file(source, target, error);
    }
    if (error)
      throw DataError(kWhere, core::concat(at, ": cannot copy ", source.string(), ": ", error.message()));
    result.bytes += static_cast<std::int64_t>(fs::file_size(target));
    ++result.files;
  }
  if (result.files == 0) throw DataError(kWhere, csv + " names no files");
  made.finish();
  return result;
}

}  // namespace cohort::data
