// All that can be wrong about the options is found before etcd is asked for anything: a file that is missing
// on one of many hosts is an error of its agent at the start, and not a line of the log that comes again.
// What needs libcurl is in a library of its own (etcd/internal/library.h).
#include "cohort/membership/etcd_store.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "cohort/base/error.h"
#include "cohort/base/files/private_file.h"
#include "cohort/base/log.h"
#include "cohort/membership/etcd/internal/library.h"

namespace cohort::membership {
namespace {

using base::concat;

constexpr const char* kWhere = "membership.etcd";
constexpr const char* kPort = ":2379";
constexpr const char* kExample = "host:port[,host:port...], such as e1:2379,e2:2379,e3:2379";

[[noreturn]] void reject_options(const std::string& what, const std::string& hint) {
  throw UsageError(kWhere, what, hint);
}

bool is_port(std::string_view text) {
  std::uint16_t port = 0;
  const char* const end = text.data() + text.size();
  return !text.empty() && std::from_chars(text.data(), end, port) == std::from_chars_result{end, {}} &&
         port > 0;
}

// Letters of names and addresses; of IPv6 those within brackets.
bool is_host(std::string_view text) {
  const bool is_ipv6 = text.size() > 2 && text.front() == '[' && text.back() == ']';
  if (is_ipv6) text = text.substr(1, text.size() - 2);
  return !text.empty() && std::all_of(text.begin(), text.end(), [&](char letter) {
    const bool is_word = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
                         (letter >= '0' && letter <= '9') || letter == '.' || letter == '-' || letter == '_';
    return is_word || (is_ipv6 && (letter == ':' || letter == '%'));
  });
}

std::string parse_endpoint(std::string_view text) {
  if (text.find("://") != std::string_view::npos) {
    reject_options(concat("an endpoint of etcd is ", text, ", expected host:port"),
                   "leave out what comes before the host; protocol=https asks for TLS");
  }
  const std::size_t colon = text.rfind(':'), bracket = text.rfind(']');
  const bool has_port =
      colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket);
  const std::string_view host = text.substr(0, has_port ? colon : text.size());
  if (!is_host(host) || (has_port && !is_port(text.substr(colon + 1)))) {
    reject_options(concat("an endpoint of etcd is \"", text, "\", expected host:port"), kExample);
  }
  return has_port ? std::string(text) : concat(host, kPort);
}

void check_file(const std::filesystem::path& path, const char* what) {
  std::error_code error;
  if (!path.empty() && !std::filesystem::is_regular_file(path, error)) {
    reject_options(concat(what, ", ", path.string(), ", is no file"), "a file that is there on each node");
  }
}

void check_options(const EtcdOptions& options) {
  if (options.endpoints.empty()) reject_options("etcd has no endpoint", kExample);
  for (const std::string& endpoint : options.endpoints) parse_endpoint(endpoint);
  if (options.run_id.empty()) reject_options("the run has no id", "--rdzv-id");
  const bool has_files = !(options.authorities.empty() && options.certificate.empty() && options.key.empty());
  if (has_files && !options.is_tls) {
    reject_options("certificates are given, and TLS is not asked for", "protocol=https, or no certificates");
  }
  if (options.certificate.empty() != options.key.empty()) {
    reject_options("a certificate goes with its key, and one of both is given", "ssl_cert and ssl_cert_key");
  }
  check_file(options.authorities, "the file of authorities");
  check_file(options.certificate, "the certificate");
  if (!options.key.empty()) base::read_private_file(options.key, kWhere, "the key of the certificate", 0);
  if (options.user.empty() != options.password_file.empty()) {
    reject_options("a user goes with the file of its password, and one of both is given",
                   "user and password_file");
  }
  if (!options.user.empty() && !options.is_tls) {
    base::log_warning(concat("the password of etcd's user ", options.user,
                             " goes over the network as it is. Try: protocol=https"));
  }
  if (!options.password_file.empty() &&
      base::read_private_file(options.password_file, kWhere, "the file of etcd's password", 1).empty()) {
    reject_options(concat("the file of etcd's password, ", options.password_file.string(), ", is empty"),
                   "a password");
  }
  if (options.request_timeout.count() < 1 || options.swap_timeout.count() < 1) {
    reject_options("a time limit is not above 0", "some hundred milliseconds");
  }
}

}  // namespace

std::vector<std::string> parse_etcd_endpoints(std::string_view text) {
  std::vector<std::string> endpoints;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    endpoints.push_back(parse_endpoint(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return endpoints;
}

std::string etcd_absent() {
  return etcd::library_absent();
}

std::shared_ptr<RecordStore> make_etcd_store(EtcdOptions options) {
  check_options(options);
  return etcd::make_store(options);
}

}  // namespace cohort::membership
