// Making image folders of what people have: archives, and flat folders with a list. Both tools write into an
// AtomicDirectory: the target folder appears whole at the end, or not at all. Names from an archive or a list
// are checked before they become paths, so no file can land outside of the folder.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/data/dataset_tools.h"
#include "cohort/data/file_bytes.h"
#include "cohort/data/internal/atomic_directory.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;
constexpr const char* kWhereImport = "data.dataset_tools";

// What a file system says to names above its limit (255 bytes, mostly).
DataError long_name(const std::string& at, const std::string& name) {
  return {kWhereImport, base::concat(at, ": the name '", name, "' is too long for this file system")};
}

DataError file_and_folder(const std::string& archive, const fs::path& entry) {
  return {kWhereImport,
          base::concat(archive, ": entry '", entry.string(),
                       "' clashes with another: a file and a folder have one name"),
          "an archive without it"};
}

void make_folders(const fs::path& path, const std::string& archive, const fs::path& entry) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return;
  if (error == std::errc::not_a_directory || error == std::errc::file_exists)
    throw file_and_folder(archive, entry);
  if (error == std::errc::filename_too_long) throw long_name(archive, entry.string());
  throw SystemError(kWhereImport, base::concat("cannot make ", path.string(), ": ", error.message()));
}

// Returns the length of the file.
std::int64_t write_entry(TarReader& reader, const fs::path& target, const std::string& archive,
                         const fs::path& entry) {
  std::error_code error;
  // An ofstream on a folder fails too, but its message would speak of the disk.
  if (fs::is_directory(target, error)) throw file_and_folder(archive, entry);
  if (error == std::errc::filename_too_long) throw long_name(archive, entry.string());
  std::ofstream file(target, std::ios::binary);
  const std::int64_t length = reader.read_content([&](std::int64_t offset, std::span<const std::byte> bytes) {
    file.seekp(offset);  // sparse files have holes
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  });
  file.close();
  error.clear();
  if (file) fs::resize_file(target, static_cast<std::uintmax_t>(length), error);  // a hole at the end
  if (!file || error) {
    throw SystemError(kWhereImport,
                      base::concat("cannot write ", target.string(), ": ", std::strerror(errno)),
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
    // RFC 4180, section 2: a doubled quote inside quotes is one quote. Line breaks in a field are not
    // supported.
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

std::vector<std::string> trimmed_fields(const std::string& line) {
  std::vector<std::string> fields = split_csv(line);
  for (std::string& field : fields) {  // "file, label": a folder's name must not begin with a space
    field.erase(0, std::min(field.find_first_not_of(" \t"), field.size()));
    field.erase(field.find_last_not_of(" \t") + 1);
  }
  return fields;
}

// Where a line has its file and its label.
struct Columns {
  std::size_t file = 0;
  std::size_t label = 1;
  std::size_t count = 2;
};

// The columns that a heading names, or nothing for a line that is none.
std::optional<Columns> parse_heading(const std::vector<std::string>& fields) {
  const auto file = std::ranges::find(fields, "file"), label = std::ranges::find(fields, "label");
  if (file == fields.end() || label == fields.end()) return std::nullopt;
  return Columns{static_cast<std::size_t>(file - fields.begin()),
                 static_cast<std::size_t>(label - fields.begin()), fields.size()};
}

// The file and label of a line.
std::pair<fs::path, std::string> parse_line(const std::string& line, const std::vector<std::string>& fields,
                                            const Columns& columns, const std::string& at) {
  if (fields.size() != columns.count || fields[columns.file].empty() || fields[columns.label].empty()) {
    throw DataError(kWhereImport,
                    base::concat(at, ": got '", line, "' (", fields.size(), " columns), expected ",
                                 columns.count == 2 ? "file,label" : base::concat(columns.count, " columns")),
                    "a first line that names the columns, two of them file and label, where there are more");
  }
  const fs::path file = fields[columns.file];
  const std::string& label = fields[columns.label];
  // "a/../../b" leads out too; the normal form shows it in its first part.
  const fs::path inside = file.lexically_normal();
  if (file.is_absolute() || *inside.begin() == "..") {
    throw DataError(kWhereImport, base::concat(at, ": file '", file.string(), "' is not inside the folder"));
  }
  if (label == "." || label == ".." || label.find('/') != std::string::npos) {
    throw DataError(kWhereImport, base::concat(at, ": label '", label, "' cannot be a folder's name"));
  }
  return std::pair(inside, label);
}

// The lines of a list, without the mark that spreadsheets put before UTF-8 and the returns of other systems.
std::vector<std::string> read_lines(const std::string& path) {
  std::vector<std::byte> buffer;
  const auto bytes = read_file_bytes(path, buffer);
  std::string_view rest(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (rest.starts_with("\xEF\xBB\xBF")) rest.remove_prefix(3);
  std::vector<std::string> lines;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    lines.emplace_back(line);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return lines;
}

// Puts one file of a list into the folder of its label; returns its length.
std::int64_t place_file(const fs::path& source, const fs::path& target, bool link, const std::string& at,
                        bool first_line) {
  std::error_code error;
  const std::string label = target.parent_path().filename().string();
  fs::create_directory(target.parent_path(), error);
  if (error == std::errc::filename_too_long) throw long_name(at, label);
  if (error) {
    throw SystemError(kWhereImport,
                      base::concat("cannot make ", target.parent_path().string(), ": ", error.message()));
  }
  // Files of two folders may have one name. The second must not replace the first in silence.
  if (fs::exists(target, error)) {
    throw DataError(kWhereImport, base::concat(at, ": label '", label, "' has a second file named ",
                                               target.filename().string()));
  }
  if (error == std::errc::filename_too_long) throw long_name(at, target.filename().string());
  error.clear();
  // A link to what a symbolic link leads to, not to the link: that may be relative.
  if (!link || ::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, target.c_str(), AT_SYMLINK_FOLLOW) != 0)
    fs::copy_file(source, target, error);
  const std::uintmax_t bytes = error ? 0 : fs::file_size(target, error);
  if (error) {
    throw DataError(kWhereImport, base::concat(at, ": cannot copy ", source.string(), ": ", error.message()),
                    first_line ? "a heading names its columns file and label, if this line is one" : "");
  }
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

GeneratedFolder unpack_tar(const std::string& archive, const std::string& folder, const TarOptions& options) {
  TarReader reader(archive, options);
  AtomicDirectory made(folder);
  GeneratedFolder result;
  while (const auto entry = reader.next()) {
    const fs::path target = made.path() / entry->path;
    if (entry->is_folder) {
      make_folders(target, archive, entry->path);
      continue;
    }
    make_folders(target.parent_path(), archive, entry->path);
    result.bytes += write_entry(reader, target, archive, entry->path);
    ++result.files;
  }
  if (result.files == 0) throw DataError(kWhereImport, archive + " holds no files");
  made.finish();
  return result;
}

GeneratedFolder folder_from_list(const std::string& flat, const std::string& csv, const std::string& folder,
                                 const LabelListOptions& options) {
  const std::vector<std::string> lines = read_lines(csv);
  AtomicDirectory made(folder);
  GeneratedFolder result;
  Columns columns;
  bool is_first = true;
  for (std::size_t number = 0; number < lines.size(); ++number) {
    if (lines[number].find_first_not_of(" \t") == std::string::npos) continue;
    const std::vector<std::string> fields = trimmed_fields(lines[number]);
    // Only the first line with content can be a heading: later ones may be files named "file".
    const bool first = std::exchange(is_first, false);
    if (const auto heading = first ? parse_heading(fields) : std::nullopt) {
      columns = *heading;
      continue;
    }
    const std::string at = base::concat(csv, ":", number + 1);
    const auto [file, label] = parse_line(lines[number], fields, columns, at);
    result.bytes +=
        place_file(fs::path(flat) / file, made.path() / label / file.filename(), options.link, at, first);
    ++result.files;
  }
  if (result.files == 0) throw DataError(kWhereImport, csv + " names no files");
  made.finish();
  return result;
}

}  // namespace cohort::data
