// An archive is untrusted: names may lead out of the folder, lengths may lie, a few kilobytes may unpack to
// terabytes. So nothing is taken from an entry that was not checked, and lengths are added up before the
// bytes come. libarchive is asked for tar and four compressions only: "all" starts lrzip, lzop and grzip from
// PATH.
#include "cohort/data/tar_reader.h"

#include <archive.h>
#include <archive_entry.h>
#include <locale.h>

#include <algorithm>
#include <string_view>

#include "cohort/base/error.h"

namespace cohort::data {
namespace {

namespace fs = std::filesystem;
constexpr const char* kWhereTar = "data.tar";
constexpr std::size_t kBlock = 1 << 16;

std::string text_or(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

// A libarchive that was built without one of the libraries starts a program instead, and says so with a
// warning when it is asked: that compression stays off.
void allow_compressions(archive* reader) {
  for (int (*allow)(archive*) : {::archive_read_support_filter_gzip, ::archive_read_support_filter_bzip2,
                                 ::archive_read_support_filter_xz, ::archive_read_support_filter_zstd}) {
    const std::unique_ptr<archive, int (*)(archive*)> trial(::archive_read_new(), ::archive_read_free);
    if (allow(trial.get()) == ARCHIVE_OK) allow(reader);
  }
}

archive* new_reader() {
  archive* reader = ::archive_read_new();
  ::archive_read_support_format_tar(reader);
  allow_compressions(reader);
  return reader;
}

// While it lives, this thread knows ASCII only. Where it knows UTF-8, libarchive composes the letters of
// names in PAX headers; where it does not, it leaves their bytes alone, with a warning.
class PlainNames {
 public:
  PlainNames() : plain_(::newlocale(LC_CTYPE_MASK, "C", nullptr)), before_(::uselocale(plain_)) {}
  ~PlainNames() {
    ::uselocale(before_);
    ::freelocale(plain_);
  }
  PlainNames(const PlainNames&) = delete;
  PlainNames& operator=(const PlainNames&) = delete;

 private:
  locale_t plain_, before_;
};

DataError rejection(const std::string& archive, const std::string& entry, const std::string& why) {
  return {kWhereTar, base::concat(archive, ": entry '", entry, "' ", why),
          "an archive from a source you trust"};
}

// The parts of an entry's name without the first `strip`; rejects names that lead out of the folder.
fs::path safe_name(const std::string& archive, const std::string& name, int strip) {
  const fs::path given(name);
  if (name.empty()) throw rejection(archive, name, "has no name");
  if (given.is_absolute()) throw rejection(archive, name, "has an absolute name");
  fs::path safe;
  for (const fs::path& part : given) {
    if (part == "..") throw rejection(archive, name, "leads out of the folder (..)");
    if (part.empty() || part == ".") continue;
    if (strip > 0) {
      --strip;
    } else {
      safe /= part;
    }
  }
  return safe;
}

}  // namespace

void TarReader::Free::operator()(archive* a) const {
  ::archive_read_free(a);
}

TarReader::TarReader(const std::string& path, const TarOptions& options)
    : name_(path), options_(options), archive_(new_reader()) {
  check_status(::archive_read_open_filename(archive_.get(), path.c_str(), kBlock));
}

TarReader::TarReader(std::span<const std::byte> bytes, const std::string& name, const TarOptions& options)
    : name_(name), options_(options), archive_(new_reader()) {
  check_status(::archive_read_open_memory(archive_.get(), bytes.data(), bytes.size()));
}

// A warning is an error too: a PAX header that was ignored because it is damaged held the name of the entry.
// Only a name beyond ASCII passes, whose bytes are there all the same.
void TarReader::check_status(int status) const {
  if (status == ARCHIVE_OK) return;
  const std::string why = text_or(::archive_error_string(archive_.get()), "unknown reason");
  if (status == ARCHIVE_WARN && why.find("can't be converted from") != std::string::npos) return;
  throw DataError(kWhereTar, base::concat("cannot read archive ", name_, ": ", why));
}

// A name may mention many folders that no entry does.
void TarReader::count(const fs::path& path, bool is_folder) {
  const auto is_new = [this](std::string_view name) {
    return folders_.insert(std::hash<std::string_view>()(name)).second;
  };
  std::string_view name = path.native();
  ++entries_;
  if (is_folder) is_new(name);
  for (std::size_t end = name.rfind('/'); end != std::string_view::npos; end = name.rfind('/')) {
    name = name.substr(0, end);
    if (!is_new(name)) break;
    ++entries_;
  }
  if (entries_ <= options_.max_entries) return;
  throw DataError(kWhereTar, base::concat(name_, " has more than ", options_.max_entries, " entries"),
                  "a higher limit (--max-entries), if you trust where it comes from");
}

void TarReader::check_lengths(std::int64_t bytes) const {
  if (bytes >= 0 && bytes <= options_.max_bytes - bytes_) return;
  throw DataError(kWhereTar, base::concat(name_, " unpacks to more than ", options_.max_bytes, " bytes"),
                  "a higher limit (--max-gib), if you trust where it comes from");
}

std::optional<TarReader::TarEntry> TarReader::next() {
  for (;;) {
    archive_entry* entry = nullptr;
    std::string name;
    {
      const PlainNames plain;
      const int status = ::archive_read_next_header(archive_.get(), &entry);
      if (status == ARCHIVE_EOF) return std::nullopt;
      check_status(status);
      name = text_or(::archive_entry_pathname(entry), "");
    }
    TarEntry found{safe_name(name_, name, options_.strip), ::archive_entry_filetype(entry) == AE_IFDIR};
    count(found.path, found.is_folder);
    const bool is_file =
        ::archive_entry_filetype(entry) == AE_IFREG && ::archive_entry_hardlink(entry) == nullptr;
    if (!found.is_folder && !is_file) {
      throw rejection(name_, name, "is a link or a device, expected a file or a folder");
    }
    const std::int64_t bytes = ::archive_entry_size(entry);
    check_lengths(bytes);
    // What is passed over is uncompressed all the same.
    const bool passed_over = found.path.empty() || found.is_folder;
    if (passed_over) bytes_ += bytes;
    if (!found.path.empty()) return found;
  }
}

std::int64_t TarReader::read_content(const Sink& sink) {
  std::int64_t length = 0;
  for (;;) {
    const void* bytes = nullptr;
    std::size_t size = 0;
    la_int64_t offset = 0;
    const int status = ::archive_read_data_block(archive_.get(), &bytes, &size, &offset);
    if (status != ARCHIVE_EOF) check_status(status);
    check_lengths(offset);
    length = std::max(length, offset + static_cast<std::int64_t>(size));
    check_lengths(length);
    if (status == ARCHIVE_EOF) break;  // its offset is the length of a file that ends with a hole
    sink(offset, {static_cast<const std::byte*>(bytes), size});
  }
  bytes_ += length;
  return length;
}

}  // namespace cohort::data
