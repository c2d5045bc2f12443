#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "cohort/core/fd.h"

/// A secret that the processes of a job share, and what they prove with it to each other.
///
///     if (const auto secret = core::Secret::of_process()) send(text, secret->code(text));
///
/// Who has a text and its code knows that somebody with the secret wrote the text, and nothing of when: a
/// text that must not be played again holds a word of random_word() that its reader has chosen.
namespace cohort::core {

/// Threads: any.
class Secret {
 public:
  /// A new one, of 32 bytes from the kernel's generator.
  static Secret make();
  /// The one in a file: its bytes, without spaces and line ends at the end of it. Throws: UsageError for a
  /// file that is not there, that belongs to neither this process's user nor root, that others than its owner
  /// may read, or of fewer than 16 or more than 4,096 bytes.
  static Secret from_file(const std::filesystem::path& path);
  /// That of this process's job: what its agent (`cohort run`) handed over, else what is in the file that
  /// COHORT_SECRET_FILE names, else nothing. Throws: as from_file; UsageError when the descriptor is not
  /// there.
  static std::optional<Secret> of_process();

  /// 64 hexadecimal digits: HMAC-SHA-256 of the text (RFC 2104, FIPS 198-1; OpenSSL's).
  std::string code(std::string_view text) const;
  /// Whether `code` is that of `text`. Takes as long for any wrong one.
  bool matches(std::string_view code, std::string_view text) const;

  /// The secret in memory that has a descriptor, to be handed to a process that is started: it finds the
  /// descriptor's number in COHORT_SECRET_FD. Nobody can change it. Throws: SystemError.
  Fd to_fd() const;

 private:
  explicit Secret(std::string bytes) : bytes_(std::move(bytes)) {}

  std::string bytes_;
};

/// 32 hexadecimal digits from the kernel's generator, never seen before.
std::string random_word();

}  // namespace cohort::core
