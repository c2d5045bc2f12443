#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "cohort/base/files/fd.h"

/// A secret that the processes of a job share, and what they prove with it to each other.
///
///     const auto secret = base::Secret::of_process();
///     if (secret) send(text, secret->derive("my protocol").code(text));
///
/// Each protocol derives a key of its own, so that no code that one of them makes is one of another's.
/// Who has a text and its code knows that somebody with the secret wrote the text, and nothing of when: a
/// text that must not be played again holds a word of random_word() that its reader has chosen.
namespace cohort::base {

/// Threads: any.
class Secret {
 public:
  /// A new one, of 32 bytes from the kernel's generator.
  static Secret make();
  /// The one in a file: its bytes, without spaces and line ends at the end of it. Throws: UsageError for a
  /// file that is not there, that belongs to neither this process's user nor root, that others than its owner
  /// may read, or of fewer than 16 or more than 4,096 bytes.
  static Secret from_file(const std::filesystem::path& path);
  /// That of the ranks of this process's job: what its agent (`cohort run`) or `spawn` handed over, else what
  /// derives for ranks from the file that COHORT_SECRET_FILE names, else nothing. It is not the secret that
  /// agents sign with. Throws: as from_file; UsageError when the descriptor is not there, or holds none.
  static std::optional<Secret> of_process();

  /// The secret for one purpose: the first 32 bytes of HMAC-SHA-512 of its name. Who has it can find neither
  /// this one nor that of another purpose; and no code() is one, whatever text is signed.
  Secret derive(std::string_view purpose) const;
  /// What ranks get of the secret that their agents sign with.
  Secret for_ranks() const { return derive("ranks"); }

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

}  // namespace cohort::base
