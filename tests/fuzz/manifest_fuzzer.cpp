// Fuzzes the reader of a checkpoint's state.json: any bytes either give a manifest, which is written back and
// read as the same, or a DataError. Hardly any bytes have the checksum that they should have, so each input
// is read a second time with the right one put in.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/text/bounded_json.h"
#include "cohort/checkpoint/manifest.h"

using namespace cohort::checkpoint;

namespace {

void check(std::string_view text) {
  Manifest manifest;
  try {
    manifest = parse_manifest(text, "state.json");
  } catch (const cohort::DataError&) {
    return;
  }
  if (manifest.sequence < 0) std::abort();
  if (!manifest.best.empty() && !is_checkpoint_name(manifest.best)) std::abort();
  const std::string written = manifest_text(manifest);
  if (manifest_text(parse_manifest(written, "again")) != written) std::abort();
}

std::optional<std::string> with_checksum(std::string_view text) {
  auto document = cohort::base::parse_bounded_json(text);
  if (!document || !document->is_object()) return std::nullopt;
  document->erase("xxh3_64");
  const std::string rest = document->dump();
  (*document)["xxh3_64"] = checksum_text(checksum(std::as_bytes(std::span(rest))));
  return document->dump();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check(text);
  if (const auto fixed = with_checksum(text)) check(*fixed);
  return 0;
}
