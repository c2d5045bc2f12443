// The file carries a checksum of its own, taken over the JSON without it, so that any damage is noticed. Text
// is parsed with bounds on size and depth, and every number and checkpoint name in it is checked before use.
// The version is compared before the checksum: a newer format is named as such, not as damage. A state that
// could not be read again is rejected when it is written.
#include "cohort/checkpoint/manifest.h"

#include <charconv>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/text/bounded_json.h"
#include "cohort/checkpoint/mapped_file.h"
#include "cohort/checkpoint/safetensors_format.h"

namespace cohort::checkpoint {
namespace {

using base::concat;
using nlohmann::json;

constexpr const char* kFormat = "cohort-checkpoint";
constexpr uint64_t kMaxNumber = uint64_t{1} << 62;  // the next sequence can be counted

[[noreturn]] void fail_manifest(const std::filesystem::path& file, const std::string& what) {
  throw DataError("checkpoint.load", concat(file.string(), " ", what), kDamagedHint);
}

std::string checksum_of(const json& document) {
  // Keys come out in the order of their names and without blanks, so the checksum does not depend on the
  // layout of the file.
  const std::string text = document.dump();
  return checksum_text(checksum(std::as_bytes(std::span(text.data(), text.size()))));
}

uint64_t parse_checksum(const std::string& text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return value;
}

int64_t number(const json& value, const char* key, const std::filesystem::path& path) {
  // Rejects negative numbers and fractions too.
  if (!value.is_number_unsigned() || value > kMaxNumber) {
    fail_manifest(path, concat("is damaged: ", key, " is ", value.dump()));
  }
  return value;
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.size()};
}

Manifest fields_of(const json& document, const std::filesystem::path& path) {
  Manifest manifest;
  try {
    manifest.sequence = number(document.at("sequence"), "sequence", path);
    // Optional: earlier versions wrote no name, best or given_up.
    manifest.name = document.value("name", std::string());
    manifest.best = document.value("best", std::string());
    for (const json& range : document.value("given_up", json::array())) {
      manifest.given_up.push_back(
          {number(range.at(0), "given_up", path), number(range.at(1), "given_up", path)});
    }
    for (const auto& [name, entry] : document.at("files").items()) {
      manifest.files[name] = {static_cast<uint64_t>(number(entry.at("bytes"), "bytes", path)),
                              parse_checksum(entry.at("xxh3_64"))};
    }
    manifest.state = document.at("state");
  } catch (const json::exception& error) {
    fail_manifest(path, concat("lacks a field: ", error.what()));
  }
  // These names become paths, so a name with a slash must not get through.
  for (const auto& [key, name] : {std::pair("best", manifest.best), {"name", manifest.name}}) {
    if (!name.empty() && !is_checkpoint_name(name)) {
      fail_manifest(path, concat("is damaged: ", key, " is ", printable(name)));
    }
  }
  return manifest;
}

}  // namespace

bool is_checkpoint_name(std::string_view name) {
  const bool reserved = name == "last" || name == "best" || name == "auto";
  return !name.empty() && !reserved && name[0] != '.' &&
         name.find_first_of(std::string_view("/~\0", 3)) == std::string_view::npos;
}

std::string manifest_text(const Manifest& manifest) {
  json files = json::object();
  for (const auto& [name, summary] : manifest.files) {
    files[name] = {{"bytes", summary.bytes}, {"xxh3_64", checksum_text(summary.checksum)}};
  }
  json document{{"format", kFormat},
                {"format_version", kCheckpointFormatVersion},
                {"sequence", manifest.sequence},
                {"files", std::move(files)},
                {"state", manifest.state}};
  if (!manifest.name.empty()) document["name"] = manifest.name;
  if (!manifest.best.empty()) document["best"] = manifest.best;
  for (const SequenceRange& range : manifest.given_up) {
    document["given_up"].push_back({range.first, range.last});
  }
  std::string text;
  try {
    // Last, over all that is in the document by now.
    document["xxh3_64"] = checksum_of(document);
    text = document.dump(2) + "\n";
  } catch (const json::exception& error) {
    throw UsageError("checkpoint.save", concat("the state cannot be written as JSON: ", error.what()));
  }
  if (!base::is_bounded_json(text)) {
    throw UsageError(
        "checkpoint.save",
        concat("the state cannot be read again: state.json would have ", text.size(), " bytes (at most ",
               base::kMaxJsonBytes, ") or more than ", base::kMaxJsonDepth, " levels"),
        "tensors for what is large, in model or optimizer");
  }
  return text;
}

void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  const std::string text = manifest_text(manifest);
  FileWriter writer(folder / kManifestFile, text.size());
  writer.write(text);
  writer.finish();
}

bool is_manifest(const std::filesystem::path& file) {
  const auto mapped = MappedFile::open(file);
  const std::optional<json> document = base::parse_bounded_json(text_of(*mapped));
  // What cannot be parsed counts too: a damaged manifest is to be reported as damaged, not as something else.
  return !document || !document->is_object() || document->value("format", json()) == kFormat;
}

Manifest read_manifest(const std::filesystem::path& folder) {
  const auto path = folder / kManifestFile;
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) {
    fail_manifest(path, "is missing");
  }
  const auto file = MappedFile::open(path);
  return parse_manifest(text_of(*file), path);
}

Manifest parse_manifest(std::string_view text, const std::filesystem::path& path) {
  if (text.empty()) {
    fail_manifest(path, "is empty (0 bytes)");
  }
  std::optional<json> document = base::parse_bounded_json(text);
  if (!document || !document->is_object() || document->value("format", json()) != kFormat) {
    fail_manifest(path, "is damaged: it is not the JSON of a checkpoint");
  }
  const json version = document->value("format_version", json());
  if (version.is_number_integer() && version > kCheckpointFormatVersion) {
    throw DataError("checkpoint.load",
                    concat(path.string(), " has format version ", version.dump(),
                           ", this Cohort reads up to version ", kCheckpointFormatVersion),
                    "load it with the Cohort that saved it, or a newer one");
  }
  const json stored = document->value("xxh3_64", json());
  document->erase("xxh3_64");
  const std::string actual = checksum_of(*document);
  if (stored != actual) {
    const std::string expected = stored.is_string() ? stored.get<std::string>() : stored.dump();
    fail_manifest(path, concat("is damaged: checksum got ", actual, ", expected ", printable(expected)));
  }
  return fields_of(*document, path);
}

}  // namespace cohort::checkpoint
