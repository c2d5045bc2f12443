// The files are read as a node is made: what is wrong with them is known before anybody connects. Before each
// connection it is looked whether one of them has changed. Then all are read again, and where something is
// wrong with them those from before stay in use: whoever replaces a certificate and its key writes one after
// the other. They are tried again once a second, as what is wrong may end without a change of a file: a
// certificate is not valid yet, or no descriptor is left to read it.
//
// A peer is whoever has a certificate that an authority signed, for the time being. Its names are not
// compared with the address: workers are reached by addresses that nobody knows as a job begins.
// docs/design/net.md, TLS.
#include "cohort/net/internal/tls/context.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/files/fd.h"
#include "cohort/base/log.h"

namespace cohort::net {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
// Of a peer's certificates, before they are checked: as many as fit into the 16 KiB that OpenSSL has for
// messages anyway.
constexpr long kMaxChainBytes = 12 * 1024;
constexpr std::chrono::seconds kBetweenTries(1);

using CertificatePointer = std::unique_ptr<X509, Releaser<&::X509_free>>;
using RevocationsPointer = std::unique_ptr<X509_CRL, Releaser<&::X509_CRL_free>>;
using KeyPointer = std::unique_ptr<EVP_PKEY, Releaser<&::EVP_PKEY_free>>;
using BioPointer = std::unique_ptr<BIO, Releaser<&::BIO_free_all>>;

// A file and what it is for: errors say both.
struct PemFile {
  const char* what;
  std::filesystem::path path;

  [[noreturn]] void reject(const std::string& problem, const std::string& hint) const {
    throw UsageError("net.tls", base::concat(what, ", ", path.string(), ", ", problem), hint);
  }

  // `is_secret`: of this process's user, or root's, and nobody else may read it.
  std::string read(bool is_secret) const {
    const base::Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status {};
    if (!file.is_open() || ::fstat(file.get(), &status) != 0) {
      reject(base::concat("cannot be read: ", std::strerror(errno)), "a file that is there on each node");
    }
    if (!S_ISREG(status.st_mode)) reject("is no regular file", "a file in PEM");
    if (is_secret && status.st_uid != ::geteuid() && status.st_uid != 0) {
      reject(base::concat("belongs to user ", status.st_uid, ", and this is a process of user ", ::geteuid()),
             base::concat("a file of one's own: chown ", ::geteuid(), " ", path.string()));
    }
    if (is_secret && (status.st_mode & 077) != 0) {
      reject("may be read by others", base::concat("chmod 600 ", path.string()));
    }
    std::string bytes(kMaxFileBytes + 1, '\0');
    std::size_t size = 0;
    for (ssize_t got = 1; got != 0 && size < bytes.size(); size += static_cast<std::size_t>(got)) {
      do {
        got = ::read(file.get(), bytes.data() + size, bytes.size() - size);
      } while (got < 0 && errno == EINTR);
      if (got < 0) reject(base::concat("cannot be read: ", std::strerror(errno)), "a file in PEM");
    }
    if (size > kMaxFileBytes) reject("has more than 1 MiB", "a file in PEM");
    bytes.resize(size);
    return bytes;
  }

  std::vector<CertificatePointer> read_certificates() const {
    const std::string bytes = read(false);
    const BioPointer bio(::BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
    std::vector<CertificatePointer> certificates;
    ::ERR_clear_error();
    while (X509* const certificate = ::PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
      certificates.emplace_back(certificate);
    }
    const bool is_end = ERR_GET_REASON(::ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    const std::string error = take_tls_error();
    if (!is_end) reject(base::concat("has a certificate that is damaged: ", error), "a file in PEM");
    if (certificates.empty()) reject("has no certificate in PEM", "openssl x509 -in FILE -text");
    return certificates;
  }

  // Revocation lists, which may stand beside certificates.
  std::vector<RevocationsPointer> read_revocations() const {
    const std::string bytes = read(false);
    const BioPointer bio(::BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
    std::vector<RevocationsPointer> lists;
    ::ERR_clear_error();
    while (X509_CRL* const list = ::PEM_read_bio_X509_CRL(bio.get(), nullptr, nullptr, nullptr)) {
      lists.emplace_back(list);
    }
    const bool is_end = ERR_GET_REASON(::ERR_peek_last_error()) == PEM_R_NO_START_LINE;
    const std::string error = take_tls_error();
    if (!is_end) reject(base::concat("has a revocation list that is damaged: ", error), "a file in PEM");
    return lists;
  }

  KeyPointer read_key() const {
    std::string bytes = read(true);
    const BioPointer bio(::BIO_new_mem_buf(bytes.data(), static_cast<int>(bytes.size())));
    bool was_asked = false;
    // Without a function of ours OpenSSL would ask on the terminal.
    const auto ask = [](char*, int, int, void* asked) {
      *static_cast<bool*>(asked) = true;
      return -1;
    };
    ::ERR_clear_error();
    KeyPointer key(::PEM_read_bio_PrivateKey(bio.get(), nullptr, ask, &was_asked));
    ::OPENSSL_cleanse(bytes.data(), bytes.size());
    if (key) return key;
    const std::string error = take_tls_error();
    if (was_asked) {
      reject("has a passphrase, and nobody is asked for it",
             base::concat("(umask 077; openssl pkey -in ", path.string(), " -out FILE)"));
    }
    reject(base::concat("has no private key in PEM: ", error), "openssl pkey -in FILE -noout");
  }
};

void check_time(const PemFile& file, const X509& certificate) {
  const ASN1_TIME* const begin = ::X509_get0_notBefore(&certificate);
  const ASN1_TIME* const end = ::X509_get0_notAfter(&certificate);
  if (::X509_cmp_current_time(end) <= 0) {
    file.reject(base::concat("has expired: it was valid until ", date_of(end)), "a new certificate");
  }
  if (::X509_cmp_current_time(begin) > 0) {
    file.reject(base::concat("is not valid yet, but from ", date_of(begin)), "set the clock of this host");
  }
}

void check(int result, const PemFile& file) {
  if (result != 1) file.reject(base::concat("cannot be used: ", take_tls_error()), "another key");
}

TlsContext::Pointer make_context(const TlsOptions& options) {
  // The process may end while a thread of a node is in OpenSSL.
  ::OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr);
  const PemFile certificate_file{"the node's certificate", options.certificate};
  const PemFile key_file{"the key of the node's certificate", options.key};
  const PemFile authorities_file{"the file of the authorities", options.authorities};
  const std::vector<CertificatePointer> chain = certificate_file.read_certificates();
  const KeyPointer key = key_file.read_key();
  const std::vector<CertificatePointer> authorities = authorities_file.read_certificates();
  check_time(certificate_file, *chain[0]);
  if (::X509_check_private_key(chain[0].get(), key.get()) != 1) {
    ::ERR_clear_error();
    key_file.reject(base::concat("does not belong to the certificate ", options.certificate.string()),
                    "the two files that were made together");
  }

  TlsContext::Pointer context(::SSL_CTX_new(::TLS_method()));
  if (!context) throw SystemError("net.tls", base::concat("OpenSSL cannot be used: ", take_tls_error()));
  ::SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
  // Only the chain of the file is sent, and no authority.
  ::SSL_CTX_set_mode(context.get(),
                     SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_NO_AUTO_CHAIN);
  ::SSL_CTX_set_read_ahead(context.get(), 1);
  // No session is resumed: a link that breaks is made again with all checks.
  ::SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_num_tickets(context.get(), 0);
  ::SSL_CTX_set_max_cert_list(context.get(), kMaxChainBytes);
  ::ERR_clear_error();
  check(::SSL_CTX_use_certificate(context.get(), chain[0].get()), certificate_file);
  for (std::size_t i = 1; i < chain.size(); ++i) {
    check(static_cast<int>(::SSL_CTX_add1_chain_cert(context.get(), chain[i].get())), certificate_file);
  }
  check(::SSL_CTX_use_PrivateKey(context.get(), key.get()), key_file);
  X509_STORE* const store = ::SSL_CTX_get_cert_store(context.get());
  for (const CertificatePointer& authority : authorities) {
    check(::X509_STORE_add_cert(store, authority.get()), authorities_file);
  }
  const std::vector<RevocationsPointer> revocations = authorities_file.read_revocations();
  for (const RevocationsPointer& list : revocations) {
    check(::X509_STORE_add_crl(store, list.get()), authorities_file);
  }
  // An authority needs none above it. Where there is one list, each authority needs one.
  ::X509_STORE_set_flags(store,
                         X509_V_FLAG_PARTIAL_CHAIN | (revocations.empty() ? 0UL : X509_V_FLAG_CRL_CHECK));
  return context;
}

// Changes with each file that is replaced or written.
std::string versions_of(const TlsOptions& options) {
  std::string versions;
  for (const auto* const path : {&options.certificate, &options.key, &options.authorities}) {
    struct stat status {};
    const bool is_there = ::stat(path->c_str(), &status) == 0;
    versions += is_there ? base::concat(status.st_dev, " ", status.st_ino, " ", status.st_size, " ",
                                        status.st_mtim.tv_sec, " ", status.st_mtim.tv_nsec, " ",
                                        status.st_ctim.tv_sec, " ", status.st_ctim.tv_nsec, ";")
                         : "missing;";
  }
  return versions;
}

}  // namespace

std::string take_tls_error() {
  const unsigned long error = ::ERR_peek_last_error();
  const char* const text =
      ERR_SYSTEM_ERROR(error) ? std::strerror(ERR_GET_REASON(error)) : ::ERR_reason_error_string(error);
  ::ERR_clear_error();
  return text == nullptr ? base::concat("error ", error, " of OpenSSL") : text;
}

std::string date_of(const ASN1_TIME* time) {
  const BioPointer bio(::BIO_new(::BIO_s_mem()));
  ::ASN1_TIME_print(bio.get(), time);
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &text);
  return {text, static_cast<std::size_t>(size)};
}

TlsContext::TlsContext(TlsOptions options)
    : options_(std::move(options)), versions_(versions_of(options_)), context_(make_context(options_)) {}

TlsContext::~TlsContext() = default;

SSL* TlsContext::make_connection(Time now) const {
  const std::lock_guard lock(mutex_);
  read_what_changed(now);
  SSL* const connection = ::SSL_new(context_.get());  // keeps the context
  if (connection == nullptr) {
    throw SystemError("net.tls", base::concat("no TLS connection can be made: ", take_tls_error()));
  }
  return connection;
}

void TlsContext::read_what_changed(Time now) const {
  std::string versions =
      versions_of(options_);  // before they are read: what changes meanwhile is seen next time
  const bool is_tried_again = !problem_.empty() && now >= next_try_;
  if (versions == versions_ && !is_tried_again) return;
  versions_ = std::move(versions);
  try {
    context_ = make_context(options_);
    problem_.clear();
  } catch (const Error& error) {
    next_try_ = now + kBetweenTries;
    const bool is_known = problem_ == error.what();
    problem_ = error.what();
    if (is_known) return;
    base::log_warning(base::concat(
        "[net.tls] files of certificates have changed and cannot be used, so those from before stay: ",
        problem_));
  }
}

}  // namespace cohort::net
