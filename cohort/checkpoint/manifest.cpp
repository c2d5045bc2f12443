#include "cohort/checkpoint/manifest.h"

#include <charconv>

#include "cohort/checkpoint/safetensors_format.h"
#include "cohort/core/error.h"

namespace cohort::checkpoint {
namespace {

using core::concat;
using nlohmann::json;

constexpr const char* kFormat = "cohort-checkpoint";
constexpr const char* kHint =
    "resume from an earlier checkpoint (auto does), or restore the file from a copy";

[[noreturn]] void fail(const std::filesystem::path& file, const std::string& what) {
  throw DataError("checkpoint.load", concat(file.string(), " ", what), kHint);
}

std::string checksum_of(const json& document) {
  const std::string text = document.dump();
  return checksum_text(checksum(std::as_bytes(std::span(text.data(), text.size()))));
}

uint64_t parse_checksum(const std::string& text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return value;
}

}  // namespace

void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  json files = json::object();
  for (const auto& [name, summary] : manifest.files) {
    files[name] = {{"bytes", summary.bytes}, {"xxh3_64", checksum_text(summary.checksum)}};
  }
  json document{{"format", kFormat},
                {"format_version", kCheckpointFormatVersion},
                {"sequence", manifest.sequence},
                {"files", std::move(files)},
                {"state", manifest.state}};
  std::string text;
  try {
    document["xxh3_64"] = checksum_of(document);
    text = document.dump(2) + "\n";
  } catch (const json::exception& error) {
    throw UsageError("checkpoint.save", concat("the state cannot be written as JSON: ", error.what()));
  }
  FileWriter writer(folder / kManifestFile, text.size());
  writer.write(text);
  writer.finish();
}

Manifest read_manifest(const std::filesystem::path& folder) {
  const auto path = folder / kManifestFile;
  if (!std::filesystem::exists(path)) {
    fail(path, "is missing");
  }
  const auto file = MappedFile::open(path);
  const auto* text = reinterpret_cast<const char*>(file->bytes().data());
  if (file->size() == 0) {
    fail(path, "is empty (0 bytes)");
  }
  json document = json::parse(text, text + file->size(), nullptr, /*allow_exceptions=*/false);
  if (!document.is_object() || document.value("format", json()) != kFormat) {
    fail(path, "is damaged: it is not the JSON of a checkpoint");
  }
  const json version = document.value("format_version", json());
  if (version.is_number_integer() && version > kCheckpointFormatVersion) {
    throw DataError("checkpoint.load",
                    concat(path.string(), " has format version ", version.dump(),
                           ", this Cohort reads up to version ", kCheckpointFormatVersion),
                    "load it with the Cohort that saved it, or a newer one");
  }
  const json stored = document.value("xxh3_64", json());
  document.erase("xxh3_64");
  const std::string actual = checksum_of(document);
  if (stored != actual) {
    fail(path, concat("is damaged: checksum got ", actual, ", expected ", stored.dump()));
  }
  Manifest manifest;
  try {
    manifest.sequence = document.at("sequence").get<int64_t>();
    for (const auto& [name, entry] : document.at("files").items()) {
      manifest.files[name] = {entry.at("bytes").get<uint64_t>(), parse_checksum(entry.at("xxh3_64"))};
    }
    manifest.state = std::move(document.at("state"));
  } catch (const json::exception& error) {
    fail(path, concat("lacks a field: ", error.what()));
  }
  return manifest;
}

std::shared_ptr<const MappedFile> open_verified(const std::filesystem::path& folder, const Manifest& manifest,
                                                const std::string& name) {
  const auto path = folder / name;
  const auto entry = manifest.files.find(name);
  if (entry == manifest.files.end()) {
    fail(folder / kManifestFile, concat("does not list ", name));
  }
  if (!std::filesystem::exists(path)) {
    fail(path, "is missing");
  }
  auto file = MappedFile::open(path);
  if (file->size() != entry->second.bytes) {
    fail(path, concat("is damaged: got ", file->size(), " bytes, expected ", entry->second.bytes));
  }
  const uint64_t actual = checksum(file->bytes());
  if (actual != entry->second.checksum) {
    fail(path, concat("is damaged: checksum got ", checksum_text(actual), ", expected ",
                      checksum_text(entry->second.checksum)));
  }
  return file;
}

}  // namespace cohort::checkpoint
