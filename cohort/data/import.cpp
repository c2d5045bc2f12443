// Making image folders of what people have: archives, and flat folders with a list.
#include <archive.h>
#include <archive_entry.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>

#include "cohort/core/error.h"
#include "cohort/data/partial_folder.h"
#include "cohort/data/tools.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;
constexpr const char* kWhere = "data.tools";

std::string text_or(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

// The parts of an entry's name without the first `strip`; refuses names that lead out of the folder.
fs::path safe_name(const std::string& archive, const std::string& name, int strip) {
  const fs::path given(name);
  const auto refuse = [&](const char* why) {
    return DataError(kWhere, core::concat(archive, ": entry '", name, "' ", why),
                     "an archive from a source you trust");
  };
  if (given.is_absolute()) throw refuse("has an absolute name");
  fs::path safe;
  for (const fs::path& part : given) {
    if (part == "..") throw refuse("leads out of the folder (..)");
    if (part.empty() || part == ".") continue;
    if (strip > 0) {
      --strip;
    } else {
      safe /= part;
    }
  }
  return safe;
}

class TarReader {
 public:
  explicit TarReader(const std::string& path) : path_(path), archive_(::archive_read_new()) {
    ::archive_read_support_format_tar(archive_.get());
    ::archive_read_support_filter_all(archive_.get());
    if (::archive_read_open_filename(archive_.get(), path.c_str(), 1 << 16) != ARCHIVE_OK) throw broken();
  }

  // The next entry, or nothing at the end.
  archive_entry* next() {
    archive_entry* entry = nullptr;
    const int status = ::archive_read_next_header(archive_.get(), &entry);
    if (status == ARCHIVE_EOF) return nullptr;
    if (status != ARCHIVE_OK) throw broken();
    return entry;
  }

  std::int64_t copy_to(const fs::path& target) {
    std::ofstream file(target, std::ios::binary);
    std::int64_t total = 0;
    for (;;) {
      const void* bytes = nullptr;
      std::size_t size = 0;
      la_int64_t offset = 0;
      const int status = ::archive_read_data_block(archive_.get(), &bytes, &size, &offset);
      if (status == ARCHIVE_EOF) break;
      if (status != ARCHIVE_OK) throw broken();
      file.seekp(offset);  // sparse files have holes
      file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
      total += static_cast<std::int64_t>(size);
    }
    file.close();
    if (!file)
      throw SystemError(kWhere, core::concat("cannot write ", target.string()), "check the space left");
    return total;
  }

 private:
  DataError broken() {
    return {kWhere, core::concat("cannot read archive ", path_, ": ",
                                 text_or(::archive_error_string(archive_.get()), "unknown reason"))};
  }

  struct Free {
    void operator()(archive* a) const { ::archive_read_free(a); }
  };
  std::string path_;
  std::unique_ptr<archive, Free> archive_;
};

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

MadeFolder unpack_tar(const std::string& archive, const std::string& folder, int strip) {
  TarReader reader(archive);
  PartialFolder made(folder);
  MadeFolder result;
  while (archive_entry* entry = reader.next()) {
    const std::string name = text_or(::archive_entry_pathname(entry), "");
    const fs::path inside = safe_name(archive, name, strip);
    const auto type = ::archive_entry_filetype(entry);
    if (type == AE_IFDIR) {
      fs::create_directories(made.path() / inside);
      continue;
    }
    if (type != AE_IFREG || ::archive_entry_hardlink(entry) != nullptr) {
      throw DataError(kWhere,
                      core::concat(archive, ": entry '", name, "' is a link or a device, expected a file"),
                      "an archive of plain files and folders");
    }
    if (inside.empty()) continue;  // stripped away
    const fs::path target = made.path() / inside;
    fs::create_directories(target.parent_path());
    result.bytes += reader.copy_to(target);
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
