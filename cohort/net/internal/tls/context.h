#pragma once

#include <openssl/ssl.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "cohort/net/tls_options.h"

namespace cohort::net {

/// Releases an object of OpenSSL.
template <auto release>
struct Releaser {
  template <typename T>
  void operator()(T* object) const {
    release(object);
  }
};

/// A node's certificate and key, and whom it believes. Threads: any.
class TlsContext {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Pointer = std::unique_ptr<SSL_CTX, Releaser<&::SSL_CTX_free>>;

  /// Reads the files. Throws: UsageError that names the file and what is wrong with it.
  explicit TlsContext(TlsOptions options);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  const TlsOptions& options() const { return options_; }
  /// A new object for one connection, with what the files have now. Throws: SystemError.
  SSL* make_connection(Time now = Time::clock::now()) const;

 private:
  void read_what_changed(Time now) const;

  const TlsOptions options_;
  mutable std::mutex mutex_;  // guards what follows
  mutable std::string versions_;
  mutable std::string problem_;  // with these versions; empty: they are in use
  mutable Time next_try_;        // where there is a problem
  mutable Pointer context_;
};

/// What OpenSSL says of the thread's last error, "certificate has expired". Forgets all its errors.
std::string take_tls_error();
/// "Nov 29 10:00:00 2026 GMT".
std::string date_of(const ASN1_TIME* time);

}  // namespace cohort::net
