#pragma once

#include <fcntl.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>

#include "cohort/net/tls_options.h"
#include "tests/support/temp_dir.h"

namespace cohort::test {

/// Signs certificates of nodes, and writes them to files that live as long as it does. Keys are of P-256.
class Authority {
 public:
  explicit Authority(std::string name = "authority")
      : name_(std::move(name)),
        key_(make_key()),
        certificate_(make(name_, key_.get(), std::chrono::hours(1))) {
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, certificate_.get(), certificate_.get(), nullptr, nullptr, 0);
    X509_EXTENSION* const is_authority =
        ::X509V3_EXT_conf_nid(nullptr, &context, NID_basic_constraints, "critical,CA:TRUE");
    ::X509_add_ext(certificate_.get(), is_authority, -1);
    ::X509_EXTENSION_free(is_authority);
    sign(certificate_.get());
    write_certificate(file(), certificate_.get());
  }
  std::filesystem::path file() const { return folder_ / "authority.pem"; }
  /// Files of a node that believes this authority. Valid from a minute ago, for `validity` from now on.
  net::TlsOptions make_node(const std::string& name,
                            std::chrono::seconds validity = std::chrono::hours(1)) const {
    const Key key = make_key();
    const Certificate certificate = make(name, key.get(), validity);
    sign(certificate.get());
    net::TlsOptions files{folder_ / (name + ".pem"), folder_ / (name + ".key"), file()};
    write_certificate(files.certificate, certificate.get());
    write_key(files.key, key.get());
    return files;
  }
  /// Writes the authority and a list, valid for an hour, that has this certificate.
  void revoke(const std::filesystem::path& certificate_file) const {
    const std::unique_ptr<BIO, int (*)(BIO*)> from(::BIO_new_file(certificate_file.c_str(), "r"), ::BIO_free);
    const Certificate revoked(::PEM_read_bio_X509(from.get(), nullptr, nullptr, nullptr), ::X509_free);
    const std::unique_ptr<X509_CRL, void (*)(X509_CRL*)> list(::X509_CRL_new(), ::X509_CRL_free);
    ::X509_CRL_set_version(list.get(), 1);
    ::X509_CRL_set_issuer_name(list.get(), ::X509_get_subject_name(certificate_.get()));
    const std::unique_ptr<ASN1_TIME, void (*)(ASN1_TIME*)> now(::X509_gmtime_adj(nullptr, -60),
                                                               ::ASN1_TIME_free),
        end(::X509_gmtime_adj(nullptr, 3'600), ::ASN1_TIME_free);
    ::X509_CRL_set1_lastUpdate(list.get(), now.get());
    ::X509_CRL_set1_nextUpdate(list.get(), end.get());
    X509_REVOKED* const entry = ::X509_REVOKED_new();
    ::X509_REVOKED_set_serialNumber(entry, ::X509_get_serialNumber(revoked.get()));
    ::X509_REVOKED_set_revocationDate(entry, now.get());
    ::X509_CRL_add0_revoked(list.get(), entry);
    if (::X509_CRL_sign(list.get(), key_.get(), ::EVP_sha256()) == 0)
      throw std::runtime_error("X509_CRL_sign failed");
    write_certificate(file(), certificate_.get());
    const std::unique_ptr<BIO, int (*)(BIO*)> to(::BIO_new_file(file().c_str(), "a"), ::BIO_free);
    if (::PEM_write_bio_X509_CRL(to.get(), list.get()) != 1)
      throw std::runtime_error("cannot write a revocation list");
  }
  /// The same key, with a passphrase.
  void encrypt(const std::filesystem::path& key_file) const {
    const Key key = make_key();
    write_key(key_file, key.get(), "passphrase");
  }

 private:
  using Key = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)>;
  using Certificate = std::unique_ptr<X509, void (*)(X509*)>;

  static Key make_key() { return {EVP_EC_gen("P-256"), ::EVP_PKEY_free}; }

  Certificate make(const std::string& name, EVP_PKEY* key, std::chrono::seconds validity) const {
    static long serial = 0;
    Certificate made(::X509_new(), ::X509_free);
    ::X509_set_version(made.get(), 2);
    ::ASN1_INTEGER_set(::X509_get_serialNumber(made.get()), ++serial);
    ::X509_gmtime_adj(::X509_getm_notBefore(made.get()), -60);
    ::X509_gmtime_adj(::X509_getm_notAfter(made.get()), validity.count());
    ::X509_set_pubkey(made.get(), key);
    set_name(::X509_get_subject_name(made.get()), name);
    set_name(::X509_get_issuer_name(made.get()), name_);
    return made;
  }
  static void set_name(X509_NAME* to, const std::string& name) {
    ::X509_NAME_add_entry_by_txt(to, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(name.data()),
                                 static_cast<int>(name.size()), -1, 0);
  }
  void sign(X509* certificate) const {
    if (::X509_sign(certificate, key_.get(), ::EVP_sha256()) == 0)
      throw std::runtime_error("X509_sign failed");
  }
  static void write_certificate(const std::filesystem::path& path, X509* certificate) {
    const std::unique_ptr<BIO, int (*)(BIO*)> file(::BIO_new_file(path.c_str(), "w"), ::BIO_free);
    if (::PEM_write_bio_X509(file.get(), certificate) != 1)
      throw std::runtime_error("cannot write a certificate");
  }
  static void write_key(const std::filesystem::path& path, EVP_PKEY* key, const char* passphrase = nullptr) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const std::unique_ptr<BIO, int (*)(BIO*)> file(::BIO_new_fd(fd, BIO_CLOSE), ::BIO_free);
    if (::PEM_write_bio_PrivateKey(file.get(), key, passphrase == nullptr ? nullptr : ::EVP_aes_128_cbc(),
                                   nullptr, 0, nullptr, const_cast<char*>(passphrase)) != 1) {
      throw std::runtime_error("cannot write a key");
    }
  }

  const TempDir folder_;
  const std::string name_;
  const Key key_;
  const Certificate certificate_;
};

}  // namespace cohort::test
