#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

namespace cohort::membership {

/// Where etcd is, and how to reach it: v3, by its HTTP/JSON gateway (etcd 3.4 or newer).
struct EtcdOptions {
  /// "host:port" each, of members of one cluster. Any may be down: the next one is asked.
  std::vector<std::string> endpoints;
  std::string run_id = "none";                 ///< no two runs at a time have the same one
  std::string prefix = "/cohort/membership/";  ///< the record's key is the prefix and the run's id

  bool is_tls = false;  ///< https
  /// PEM: who signed etcd's certificates; empty: those that the system trusts.
  std::filesystem::path authorities;
  std::filesystem::path certificate;  ///< PEM: of this client, where etcd wants one
  std::filesystem::path key;          ///< PEM: of the certificate; only its owner may read it

  std::string user;                     ///< where etcd has authentication
  std::filesystem::path password_file;  ///< of the user; only its owner may read it. Read at each login

  /// Of a request to an endpoint; up to eight times as long where none answers.
  std::chrono::milliseconds request_timeout{500};
  /// Of a compare-and-swap over all endpoints; then it is kUnknown, and the record is told as soon as etcd
  /// answers.
  std::chrono::milliseconds swap_timeout{1'500};
};

}  // namespace cohort::membership
