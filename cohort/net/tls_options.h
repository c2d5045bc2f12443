#pragma once

#include <filesystem>
#include <optional>

namespace cohort::net {

/// Files of certificates (PEM), with which a node encrypts its TCP links and checks who its peers are: TLS
/// 1.3, both sides. Files that change are read again before the next connection. docs/guide/net.md has the
/// commands that make them.
struct TlsOptions {
  std::filesystem::path certificate;  ///< of this node; after it those between it and an authority, if any
  std::filesystem::path key;  ///< of the certificate, without a passphrase; only its owner may read it
  /// Whoever has a certificate that one of them signed may be a peer; and their revocation lists, if any.
  std::filesystem::path authorities;

  /// The files that COHORT_TLS_CERTIFICATE, COHORT_TLS_KEY and COHORT_TLS_AUTHORITIES name. Nothing where
  /// none of the three is set. Throws: UsageError where one or two are set.
  static std::optional<TlsOptions> of_process();
};

}  // namespace cohort::net
