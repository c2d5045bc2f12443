#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

/// The file in which a rank says why it failed, in torchrun's format. No LibTorch.
namespace cohort::launch {

/// The launcher that started this process, `cohort run` or torchrun, will show `message` when the process
/// ends badly. Does nothing without a launcher, and when an error was recorded before: the first one counts.
///
///     try {
///       train();
///     } catch (const std::exception& error) {
///       cohort::launch::record_error(error.what());
///       return 1;
///     }
///
/// The file is the one that TORCHELASTIC_ERROR_FILE names. Never throws: a program that fails must not fail
/// again here.
void record_error(std::string_view message) noexcept;

/// What a rank has said of its failure.
struct RecordedError {
  std::string message;  ///< the exception's, as record_error() got it
  std::string details;  ///< a call stack, when the program wrote one
  double time = 0;      ///< when it was written, in seconds since 1970
};

/// Reads what a rank has recorded: {"message": TEXT} or {"message": {"message": TEXT, "extraInfo": {...}}}.
/// Returns nothing when there is no file; text that is no such JSON is the message as it stands.
std::optional<RecordedError> read_error_file(const std::filesystem::path& path);

}  // namespace cohort::launch
